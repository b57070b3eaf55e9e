"""The report as a table."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

TITLE = "response tokens per second, log-probs included, and the speedup over generate"
COLUMNS = ("model", "case", "path", "tok/s", "slowest", "fastest", "x generate", "mean length")


def render(report: dict[str, Any]) -> Group:
    """Return the report as a table and text."""
    table = Table(*COLUMNS, title=TITLE, title_justify="left")
    for column in table.columns[3:]:
        column.justify = "right"
    for case in report["cases"]:
        ratio = case["ratio_to_generate"]
        table.add_row(
            case["model"],
            case["case"],
            case["path"],
            f"{case['tokens_per_s']:.0f}",
            f"{case['slowest_tokens_per_s']:.0f}",
            f"{case['fastest_tokens_per_s']:.0f}",
            "-" if ratio is None else f"{ratio:.2f}",
            f"{case['mean_response_tokens']:.0f}",
        )
    difference = max(case["max_difference"] for case in report["cases"])
    lines = [
        f"log-probs differ from a plain forward's by at most {difference:.1e} nats",
        *(f"{entry['model']}: {entry['path']} was skipped: {entry['reason']}" for entry in report["skipped"]),
    ]
    return Group(table, Text("\n".join(lines)))
