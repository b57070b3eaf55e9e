"""The report as a table."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text


def render(report: dict[str, Any]) -> Group:
    """Return the report as a table and text."""
    phases = sorted({phase for path in report["paths"].values() for phase in path["seconds_by_phase"]})
    table = Table("path", "s/step", "tok/s", "store", *phases, title=_title(report), title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, path in report["paths"].items():
        seconds = [f"{path['seconds_by_phase'].get(phase, 0.0):.2f}" for phase in phases]
        table.add_row(
            name,
            f"{path['seconds_per_step']:.2f}",
            f"{path['tokens_per_s']:.0f}",
            f"{path['data_plane']['share']:.1%}",
            *seconds,
        )
    speedups = [
        f"overlapped is {value:.2f} times as fast as {name}"
        for name, value in report["speedup"].items()
        if name != "overlapped"
    ]
    for name, peer in report["peers"].items():
        speedups.append(
            f"{name} {peer['version']}: {peer['seconds_per_step']:.2f} s/step (generation "
            f"{peer['generate_seconds']:.2f}, the rest {peer['other_seconds']:.2f}; {peer['rows_per_forward']} rows "
            "per forward, the fastest)"
        )
        for path, value in report["speedup_over_peers"][name].items():
            speedups.append(f"{path} is {value:.2f} times as fast as {name}")
    return Group(table, Text("\n".join(speedups)))


def _title(report: dict[str, Any]) -> str:
    plan = report["plan"]
    parts = [f"{plan['threads']} threads per worker"] * bool(plan["threads"])
    parts += [f"beside {plan['beside']} busy processes"] * bool(plan["beside"])
    return ", ".join(["whole GRPO steps, medians", *parts])
