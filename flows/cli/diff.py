"""`sluice diff`: how two runs differ."""

import json
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli.terminal import plain_table, with_width
from infra.history.diff import Closeness, Difference, StepDiff, diff_runs, is_within
from infra.storage.runs import RunDirectory
from infra.stores.offline import RunColumns
from schemas.config.load import differences

HEADER = ("stage", "column", "row", "token", "A", "B", "different", "largest", "")


def print_diff(
    console: Console, a: RunDirectory, b: RunDirectory, accepted: Closeness, *, all_steps: bool, as_json: bool
) -> bool:
    """Print how two runs differ, up to the first step in which they do; return whether all of it is accepted.

    Raises:
        RunError: They have no step in common.
        StoreError: Columns are lost or damaged.
    """
    configs = differences({"A": a.config(), "B": b.config()})
    found: list[StepDiff] = []  # steps with other bits
    num_compared = num_with_columns = num_rejected = 0
    for step in diff_runs(a, b):
        num_compared += 1
        num_with_columns += step.has_columns
        found += [step] if step.stages else []
        if not is_within(step.closeness, accepted):
            num_rejected += 1
            if not all_steps:
                break
    if as_json:
        steps = [{**step.model_dump(), "closeness": step.closeness} for step in found]
        counts = {"compared": num_compared, "with_columns": num_with_columns}
        print(json.dumps({"same": not num_rejected, **counts, "config": configs, "steps": steps}))
        return not num_rejected
    for key, values in configs.items():
        line = f"config {key}: {values.get('A', 'missing')!r} and {values.get('B', 'missing')!r}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for step in found if all_steps else found[:1] + found[1:][-1:]:
        with_width(console).print(_table(step))
    verdict = _verdict(num_compared, found, accepted, num_rejected)
    reasons: list[str] = []
    if num_with_columns < num_compared:
        verdict += f"; columns of {num_with_columns:,} of them, plans and metrics alone of the others"
        reasons = [reason for run in (a, b) if (reason := RunColumns(run).missing) is not None]
    console.print(*reasons, verdict, sep="\n", soft_wrap=True, markup=False, highlight=False)
    if num_rejected and not all_steps:
        console.print("later steps were not compared: --all")
    return not num_rejected


def _verdict(num_compared: int, found: Sequence[StepDiff], accepted: Closeness, num_rejected: int) -> str:
    if not found:
        return f"{num_compared:,} steps compared: same bits"
    stage = found[0].stages[0]
    where = f"first in step {found[0].step}, stage {stage.stage}, {_place(stage.differences[0])}"
    if not num_rejected:
        return f"{num_compared:,} steps compared: {len(found):,} of them {accepted}, {where}"
    return f"{num_compared:,} steps compared: {num_rejected:,} differ, {where}"


def _place(found: Difference) -> str:
    places = {"row": found.row, "token": found.token}
    parts = [found.column, *(f"{name} {number}" for name, number in places.items() if number is not None)]
    return f"{', '.join(parts)}: {found.a} and {found.b}"


def _table(step: StepDiff) -> Table:
    title = f"step {step.step}" + ("" if step.has_columns else ": plan and metrics only, as not both keep its columns")
    table = plain_table(*HEADER, left=len(HEADER), title=title)
    for stage in step.stages:
        for found in stage.differences:
            table.add_row(stage.stage, *difference_cells(found))
    return table


def difference_cells(found: Difference) -> Iterator[Text]:
    """Return the cells of `HEADER` that say how two columns differ, all but the first one."""
    numbers = ("" if value is None else str(value) for value in (found.row, found.token))
    counts = f"{found.num_different:,} of {found.num_compared:,}" if found.num_compared > 1 else ""
    largest = "" if found.largest is None else f"{found.largest:.3g}"
    return map(Text, (found.column, *numbers, found.a, found.b, counts, largest, found.closeness))
