"""The report as a table."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text


def render(report: dict[str, Any]) -> Group:
    """Return the report as a table and text."""
    title = f"the driver's work in a step of {report['rows']:,} rows and {report['ranks']:,} ranks"
    table = Table("part", "CPU, ms", "wall, ms", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, part in report["parts"].items():
        table.add_row(name, f"{1000 * part['cpu_seconds']:.0f}", f"{1000 * part['wall_seconds']:.0f}")
    total = (
        f"{report['driver_seconds']:.2f} s of processor time, {report['wall_seconds']:.2f} s of wall-clock time, "
        f"{report['peak_bytes'] / 2**30:.2f} GiB"
    )
    sent = f"{report['calls']:,} calls of workers with {report['argument_bytes'] / 2**20:.1f} MiB of arguments"
    return Group(table, Text(f"{total}\n{sent}"))
