"""The report as a table."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text


def render(report: dict[str, Any]) -> Group:
    """Return the report as a table and text."""
    table = Table("phase", "p50, ms", "first step, ms", title="a step of a real run", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for phase, milliseconds in report["phases_ms_p50"].items():
        table.add_row(phase, f"{milliseconds:.0f}", f"{report['first_step_ms'][phase]:.0f}")
    table.add_row("between steps", f"{report['between_steps_ms_p50']:.0f}", "")
    overhead = (
        f"overhead per step: p50 {report['step_overhead_ms_p50']:.0f} ms, p95 {report['p95']:.0f} ms, "
        f"{report['slope_ms_per_100_steps']:+.1f} ms per 100 steps"
    )
    stalls = f"{report['stalls']} stalls in {report['steps']} steps"
    return Group(table, Text(f"{overhead}\n{stalls}"))
