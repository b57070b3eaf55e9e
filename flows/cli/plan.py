"""`sluice plan`: one step of a config, planned without starting anything."""

from rich import box
from rich.console import Console
from rich.table import Table

from flows.cli.footprint import Footprint, measure_step
from flows.cli.simulate import LengthShape
from flows.preflight import check
from schemas.config.run import RunConfig


def plan_config(console: Console, config: RunConfig, *, shape: LengthShape, fill: float, as_json: bool = False) -> None:
    """Check a config, simulate one step, and print its footprint; see `flows.cli.footprint.measure_step`.

    Args:
        console: The console to print on.
        config: The run.
        shape: The distribution of the response lengths.
        fill: The mean response length, as a fraction of `rollout.max_response_tokens`.
        as_json: Whether to print one JSON value instead of tables.

    Raises:
        UserError: The config is not usable, or the step can't fit; in that case the footprint is printed first.
    """
    check(config)
    footprint = measure_step(config, shape, fill)
    if as_json:
        console.out(footprint.model_dump_json(indent=2), highlight=False)
    else:
        print_footprint(console, footprint)
    footprint.check_capacity()


def print_footprint(console: Console, footprint: Footprint) -> None:
    """Print rows and tokens, the plans, the columns, the bytes of the store and of a rank, and warnings."""
    for part in (_headline(footprint), _plans(footprint)):
        console.print(part, markup=False, highlight=False, soft_wrap=True)
    console.print(_columns(footprint))
    console.print(_bytes(footprint))
    for warning in footprint.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _headline(footprint: Footprint) -> str:
    return (
        f"one step: {footprint.num_rows:,} rows, {footprint.prompt_tokens:,} prompt tokens (at most "
        f"{footprint.longest_prompt:,}), {footprint.response_tokens:,} response tokens drawn (at most "
        f"{footprint.longest_response:,})\n"
        f"padding: 0 tokens; a padded batch would be {footprint.padded_tokens:,} tokens, "
        f"{footprint.pad_waste:.1%} of them padding\n"
    )


def _plans(footprint: Footprint) -> str:
    return f"updates: {footprint.plan}\n\nscoring: {footprint.forward}\n"


def _columns(footprint: Footprint) -> Table:
    table = _table("column", "axis", "dtype", "values", "bytes", left=3)
    for column in footprint.columns:
        table.add_row(column.name, column.axis, column.dtype, f"{column.num_values:,}", f"{column.num_bytes:,}")
    table.add_row("Arrow files", "", "", "", f"{footprint.chunk_bytes:,}")
    return table


def _bytes(footprint: Footprint) -> Table:
    ranks, of_rank = footprint.plan.num_ranks, footprint.rank_bytes
    lines = {
        "store, peak of a step": footprint.store_bytes,
        "store, with the longest responses": footprint.most_store_bytes,
        "store.capacity_bytes": footprint.capacity_bytes,
        f"weights, each of {ranks} policy ranks": of_rank.weights,
        "gradients": of_rank.gradients,
        "optimizer": of_rank.optimizer,
    }
    if of_rank.previous:
        lines["weights of the previous version"] = of_rank.previous
    if of_rank.reference:
        lines["weights, each reference rank"] = of_rank.reference
    table = _table("memory", "bytes", "MiB", left=1)
    for name, num_bytes in lines.items():
        table.add_row(name, f"{num_bytes:,}", f"{num_bytes / 2**20:,.1f}")
    return table


def _table(*names: str, left: int) -> Table:
    """Return an empty table whose first `left` columns hold text and the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=True, padding=(0, 1, 0, 0))
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    return table
