"""The tables of `sluice plan`."""

from collections.abc import Iterator

from rich import box
from rich.table import Table

from flows.plan.footprint import Footprint
from flows.plan.limits import Limit
from flows.plan.resources import Resources
from rl_core.planning.hardware import format_bytes
from rl_core.planning.memory import PHASES, PhaseBytes
from schemas.config.environment import EnvironmentConfig


def footprint_parts(footprint: Footprint) -> Iterator[str | Table]:
    """Yield rows and tokens, the environments, the plans, the columns and the store."""
    reused = f" ({footprint.num_reused:,} of stored groups)" if footprint.num_reused else ""
    yield (
        f"one step: {footprint.num_rows:,} rows{reused}, {footprint.prompt_tokens:,} prompt tokens (at most "
        f"{footprint.longest_prompt:,}), {footprint.response_tokens:,} response tokens drawn (at most "
        f"{footprint.longest_response:,})\n"
        f"padding: 0 tokens; a padded batch would be {footprint.padded_tokens:,} tokens, "
        f"{footprint.pad_waste:.1%} of them padding\n"
    )
    if footprint.environments:
        yield "\n".join(map(_environment, footprint.environments)) + "\n"
    yield f"updates: {footprint.plan}\n\nscoring: {footprint.forward}\n"
    columns = _table("column", "axis", "dtype", "values", "bytes", left=3)
    for column in footprint.columns:
        columns.add_row(column.name, column.axis, column.dtype, f"{column.num_values:,}", f"{column.num_bytes:,}")
    columns.add_row("Arrow files", "", "", "", f"{footprint.chunk_bytes:,}")
    yield columns
    store = _table("store", "bytes", "MiB", left=1)
    for name, num_bytes in {
        "peak of a step": footprint.store_bytes,
        "with the longest responses": footprint.most_store_bytes,
        "store.capacity_bytes": footprint.capacity_bytes,
    }.items():
        store.add_row(name, f"{num_bytes:,}", f"{num_bytes / 2**20:,.1f}")
    yield store


def resource_parts(resources: Resources) -> Iterator[str | Table]:
    """Yield memory by worker and phase, host memory, transfers, seconds, and the limits."""
    phases = _table("memory of each", *PHASES, left=1)
    parts = _table("of which", "of", "bytes", left=2)
    for worker in resources.workers:
        name = f"{worker.count} {worker.role}" + (f" (a GPU of {worker.gpus})" * (worker.gpus > 1))
        phases.add_row(name, *_by_phase(worker.phases))
        for name, num_bytes in worker.parts.items():
            parts.add_row(name, worker.role, format_bytes(num_bytes))
    for name, num_bytes in resources.host.parts.items():
        parts.add_row(name, f"host, node {resources.host.node}", format_bytes(num_bytes))
    if resources.shared is not None:
        phases.add_row("a shared GPU", *_by_phase(resources.shared))
    yield phases
    yield parts
    yield _traffic(resources)
    if resources.seconds is None:
        yield "time: not known for this machine; --calibrate measures it, --cluster 8xH100 plans for another one\n"
    else:
        yield _seconds(resources)
    limits = _table("limit", "where", "used", "available", "fraction", left=2)
    for limit in resources.limits:
        limits.add_row(
            limit.name, limit.where, _amount(limit, limit.used), _amount(limit, limit.available), _percent(limit)
        )
    yield limits
    yield f"on {resources.cluster.name}, {_verdict(resources)}"


def _environment(environment: EnvironmentConfig) -> str:
    what = f"tools {', '.join(environment.tools)}" if environment.kind == "tools" else f"class {environment.path}"
    tokens = f" of at most {environment.max_turn_tokens:,} tokens" if environment.max_turn_tokens else ""
    processes = f"{environment.num_processes} process{'es' * (environment.num_processes > 1)} per rollout worker"
    return (
        f"environment: {what}; at most {environment.max_turns:,} turns{tokens}; {processes}; at most "
        f"{environment.reset_timeout_seconds:g} s a reset, {environment.step_timeout_seconds:g} s a step, "
        f"{environment.trajectory_timeout_seconds:g} s a trajectory"
    )


def _by_phase(phases: PhaseBytes) -> list[str]:
    values = [format_bytes(getattr(phases, phase)) for phase in PHASES]
    values[PHASES.index(phases.peak_phase)] += "*"
    return values


def _traffic(resources: Resources) -> Table:
    table = _table("transfers of a step", "bytes", "between nodes", "time", left=1)
    for transfer in resources.traffic:
        seconds = "" if transfer.seconds is None else _seconds_text(transfer.seconds)
        table.add_row(transfer.name, format_bytes(transfer.num_bytes), format_bytes(transfer.network_bytes), seconds)
    return table


def _seconds(resources: Resources) -> str:
    seconds = resources.seconds
    assert seconds is not None
    overlap = "; the rollout runs while the previous step is trained" if seconds.overlapped else ""
    parts = {name: getattr(seconds, name) for name in ("rollout", "scoring", "update", "transfers")}
    listed = ", ".join(f"{name} {_seconds_text(value)}" for name, value in parts.items())
    return (
        f"time: {_seconds_text(seconds.total)} a step, {float(f'{seconds.steps_per_hour:.3g}'):,g} steps an hour: "
        f"{listed}{overlap}\n(from {seconds.source}; without rewards, evaluations and the driver)\n"
    )


def _verdict(resources: Resources) -> str:
    first = resources.binding
    if first.is_exceeded:
        return f"the run does not fit: {first.name} ({first.where}) binds first, {_percent(first)} of what there is"
    fullest = max((limit for limit in resources.limits if not limit.is_time), key=lambda limit: limit.fraction)
    if not first.is_time:
        return f"the run fits; {first.name} ({first.where}) binds first, {_percent(first)} full"
    return (
        f"the run fits; {first.name} ({first.where}) binds first, {_percent(first)} of a step's time; "
        f"the fullest is {fullest.name} ({fullest.where}), {_percent(fullest)}"
    )


def _percent(limit: Limit) -> str:
    return f"{limit.fraction:.1%}"


def _amount(limit: Limit, amount: float) -> str:
    return _seconds_text(amount) if limit.is_time else format_bytes(amount)


def _seconds_text(seconds: float) -> str:
    """Format seconds with three significant digits."""
    return f"{float(f'{seconds:.3g}'):,g} s"


def _table(*names: str, left: int) -> Table:
    """Return an empty table whose first `left` columns hold text and the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=True, padding=(0, 1, 0, 0))
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    return table
