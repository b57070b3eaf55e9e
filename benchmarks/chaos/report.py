"""The report as a table."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text


def render(report: dict[str, Any]) -> Group:
    """Return the report as a table of faults, and totals."""
    table = Table("run", "fault", "step", "moment", "delay s", "the run", title="faults", title_justify="left")
    for fault in report["faults"]:
        outcome = "stopped, and was resumed" if fault["stopped"] else "went on"
        table.add_row(
            fault["run"], fault["kind"], str(fault["step"]), fault["moment"], f"{fault['delay']:.2f}", outcome
        )
    totals = {name: value for name, value in report.items() if name != "faults"}
    return Group(table, Text("\n".join(f"{name}: {value}" for name, value in totals.items())))
