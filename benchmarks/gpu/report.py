"""The report as a table, on the terminal and in Markdown."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.gpu.results import CheckResult, Report


def render(report: Report) -> Group:
    """Return the report as a table and text."""
    table = Table("check", "status", "s", "figures", title=_title(report), title_justify="left")
    for check in report.checks:
        table.add_row(check.name, check.status, f"{check.seconds:.0f}", Text("\n".join(_details(check))))
    return Group(table, Text(_machine(report)))


def markdown(report: Report) -> str:
    """Return the report as a page of Markdown."""
    lines = [f"# {_title(report)}", "", _machine(report), "", "| check | status | s | figures |", "|---|---|---|---|"]
    for check in report.checks:
        cells = (check.name, check.status, f"{check.seconds:.0f}", "<br>".join(_details(check)).replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _title(report: Report) -> str:
    if report.settings.is_twin:
        return "GPU checklist, twin on the CPU: its figures say nothing of a GPU"
    gpus = report.machine["gpus"]
    return f"GPU checklist on {len(gpus)} x {gpus[0]}"


def _machine(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.machine["versions"].items())
    failed = sum(check.status == "failed" for check in report.checks)
    return (
        f"{len(report.checks)} checks in {report.seconds:.0f} s, {failed} failed; MFU is of "
        f"{report.settings.peak_tflops:g} TFLOP/s; {versions}"
    )


def _details(check: CheckResult) -> list[str]:
    return [*([check.reason] if check.reason else []), *(f"{name}: {value}" for name, value in check.figures.items())]
