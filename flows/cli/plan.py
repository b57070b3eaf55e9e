"""`sluice plan`: one step of a config, planned without starting anything, on one screen."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from flows.cli.example import Example, SftExample, example_lines, show_example
from flows.cli.terminal import plain_table, with_width
from flows.plan.footprint import Footprint, measure_step
from flows.plan.resources import Resources, plan_resources, this_machine
from flows.preflight import check
from rl_core.planning.hardware import format_bytes, parse_cluster
from rl_core.planning.memory import PHASES, PhaseBytes
from schemas.base import Frozen
from schemas.config.environment import EnvironmentConfig
from schemas.config.run import RunConfig


class Plan(Frozen):
    """A step's footprint, what the run takes of its machines, and one of its prompts."""

    example: Example | SftExample
    footprint: Footprint
    resources: Resources


def plan_config(
    console: Console, config: RunConfig, *, fill: float, cluster: str | None = None, as_json: bool = False
) -> None:
    """Check a config, simulate one step, and print what it takes.

    Args:
        console: The console to print on.
        config: The run.
        fill: The mean response length, as a fraction of `rollout.max_response_tokens`.
        cluster: The cluster to plan for, see `rl_core.planning.hardware.parse_cluster`; None: this machine.
        as_json: Whether to print one JSON value instead of tables.

    Raises:
        UserError: The config is not usable, or the step can't fit; in that case the plan is printed first.
    """
    prompts = check(config, runs_here=cluster is None)
    footprint = measure_step(config, fill, prompts)
    machines = this_machine() if cluster is None else parse_cluster(cluster)
    resources = plan_resources(config, footprint, machines, fill=fill, data=prompts)
    plan = Plan(example=show_example(config, prompts), footprint=footprint, resources=resources)
    if as_json:
        console.out(plan.model_dump_json(indent=2), highlight=False)
    else:
        for part in _parts(config, plan, fill):
            if isinstance(part, str):
                console.print(part, markup=False, highlight=False, soft_wrap=True)
            else:
                with_width(console).print(part)
        for warning in (*footprint.warnings, *resources.warnings):
            console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    footprint.check_capacity()
    resources.check()
    if not as_json:
        verdict, style = resources.verdict, "bold green"
        if resources.exceeded:
            verdict, style = f"warning: {verdict}", "bold yellow"
        console.print(verdict, style=style, markup=False, highlight=False, soft_wrap=True)


def _parts(config: RunConfig, plan: Plan, fill: float) -> Iterator[str | Table]:
    """Yield the method, a prompt, the rows and their micro-batches, and what they take."""
    footprint, resources = plan.footprint, plan.resources
    yield f"run {config.name}: {config.steps:,} steps; {_method(config)}"
    yield from _distillation(config)
    yield from example_lines(plan.example)
    yield from map(_environment, config.environments)
    reused = f" ({footprint.num_reused:,} of stored groups)" if footprint.num_reused else ""
    responses = f"if {fill:.0%} of the limit of {config.rollout.max_response_tokens:,} a row on average"
    if config.sft is not None:
        responses = f"{footprint.loss_tokens:,} of them with loss"
    yield (
        f"\none step: {footprint.num_rows:,} rows{reused}, {footprint.prompt_tokens:,} prompt tokens (at most "
        f"{footprint.longest_prompt:,} a row), {footprint.response_tokens:,} response tokens ({responses})\n"
        f"padding: 0 tokens; a padded batch would be {footprint.padded_tokens:,} tokens, "
        f"{footprint.pad_waste:.1%} of them padding"
    )
    yield _sharing(footprint)
    yield f"updates: {footprint.plan}" + ("" if config.sft else f"\nscoring: {footprint.forward}")
    yield (
        f"columns: {len(footprint.columns)}, of {format_bytes(footprint.store_bytes)} a step, or "
        f"{format_bytes(footprint.most_store_bytes)} with the longest responses\n"
    )
    yield from _memory(resources)
    limits = plain_table("limit", "where", "needed", "available", "used", left=2)
    for limit in resources.limits:
        used, available = format_bytes(limit.used), format_bytes(limit.available)
        style = "red" if limit.fraction > 1 else "bold" if limit == resources.binding else None
        limits.add_row(limit.name, limit.where, used, available, f"{limit.fraction:.1%}", style=style)
    yield limits
    yield ""


def _method(config: RunConfig) -> str:
    """Return what the run trains with."""
    parts = [f"advantage {config.advantage.kind}, loss {config.loss.kind}, correction {config.correction.kind}"]
    if config.sft is not None:
        parts = [f"SFT, loss {config.loss.kind} on {config.sft.loss_on} tokens"]
    if config.kl.coef:
        place = "subtracted from the reward" if config.kl.in_reward else "in the loss"
        parts.append(f"{config.kl.coef:g} x KL ({config.kl.estimator}) {place}")
    if config.loss.observation_coef:
        parts.append(f"{config.loss.observation_coef:g} x cross-entropy of observations")
    if config.rollout.sampling_mask:
        parts.append("scores over the sampling mask")
    if config.optim.kind == "muon":
        parts.append("optimizer Muon")
    return ", ".join(parts)


def _sharing(footprint: Footprint) -> str:
    if not footprint.shares_prompts:
        return footprint.sharing
    num_tokens = footprint.prompt_tokens + footprint.response_tokens
    return f"prompts shared: {footprint.shared_tokens:,} of {num_tokens:,} tokens are not computed again"


def _memory(resources: Resources) -> Iterator[str | Table]:
    """Yield memory by worker and phase, and what it consists of."""
    phases = plain_table("memory of each (*: most)", *PHASES, left=1)
    parts = plain_table("of which", "not all of it at the same time", left=2)
    for worker in resources.workers:
        name = f"{worker.count} {worker.role}" + (f" (a GPU of {worker.gpus})" * (worker.gpus > 1))
        phases.add_row(name, *_by_phase(worker.phases))
        parts.add_row(worker.role, _listed(worker.parts))
    if resources.shared is not None:
        phases.add_row("a shared GPU", *_by_phase(resources.shared))
    parts.add_row(f"host, node {resources.host.node}", _listed(resources.host.parts))
    yield phases
    yield ""
    yield parts
    yield ""


def _listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts.items())


def _distillation(config: RunConfig) -> Iterator[str]:
    """Yield what is learned from teachers, and who teaches which rows."""
    if (distillation := config.distillation) is None:
        return
    factor = distillation.reward_weight
    reward = f" + {factor:g} x that of the reward" if factor else "; the reward is only reported"
    term = "reverse KL of the sampled tokens; advantage of a token: {:g} x (teacher's - policy's log-prob)"
    if distillation.reads_top:
        what = f"{distillation.divergence} over a teacher's {distillation.top_k} most likely tokens"
        term = f"{what}; loss of a token: {{:g}} x that"
    yield f"distillation: on-policy, {term.format(distillation.weight)}{reward}"
    for name, teacher in distillation.teachers.items():
        model = "the policy itself" if teacher.path is None else teacher.path
        rows = f"of data source {', '.join(teacher.data_sources)}" if teacher.data_sources else "of all other sources"
        rows = "of all rows" if len(distillation.teachers) == 1 and not teacher.data_sources else rows
        prompt = f"; reads {teacher.prompt!r:.80}" if teacher.prompt else ""
        yield f"teacher {name} {rows}: {model}{prompt}"


def _environment(environment: EnvironmentConfig) -> str:
    tokens = f" of at most {environment.max_turn_tokens:,} tokens" if environment.max_turn_tokens else ""
    processes = f"{environment.num_processes} process{'es' * (environment.num_processes > 1)} per rollout worker"
    return (
        f"environment: {environment.what}; at most {environment.max_turns:,} turns{tokens}; {processes}; at most "
        f"{environment.reset_timeout_seconds:g} s a reset, {environment.step_timeout_seconds:g} s a step, "
        f"{environment.trajectory_timeout_seconds:g} s a trajectory"
    )


def _by_phase(phases: PhaseBytes) -> list[str]:
    values = [format_bytes(getattr(phases, phase)) for phase in PHASES]
    values[PHASES.index(phases.peak_phase)] += "*"
    return values
