"""A run's metrics and summary, in the terminal and as a self-contained HTML page."""

import html
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from flows.progress import metric_values, source_rows
from infra.storage.atomic import write_atomic
from infra.storage.runs import RunDirectory
from schemas.metric_catalog import metrics_of
from schemas.step import RunSummary, StepReport

WIDTH, HEIGHT, MARGIN = 640, 160, 44

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 720px; margin: 2rem auto; padding: 0 1rem }
body, svg text { color: #1b1f24; background: #fff }
h1 { font-size: 1.4rem }
h2 { font-size: 1rem; margin: 1.6rem 0 .2rem }
table { border-collapse: collapse }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
svg { width: 100%; height: auto }
svg text { font: 11px system-ui, sans-serif; fill: #57606a }
polyline { fill: none; stroke: #1f6feb; stroke-width: 1.5 }
line { stroke: #d0d7de }
"""


def render_summary(summary: RunSummary, path: Path) -> Table:
    """Return a finished run's summary as a table."""
    table = Table(title=f"run {summary.run_id}", show_header=False, title_justify="left")
    for name, value in _summary_rows(summary):
        table.add_row(name, value)
    table.add_row("files", str(path))
    return table


def render_table(directory: RunDirectory, every: int = 10) -> Table:
    """Return a table of each `every`-th step, the last step and the evaluations, with the terminal's metrics."""
    steps = directory.metrics.steps()
    columns = [spec for spec in metrics_of("terminal") if any(spec.name in report.metrics for report in steps)]
    names = [spec.name for spec in columns]
    table = Table("step", *names, "seconds", title=f"run {directory.run_id}", title_justify="left")
    for report in steps:
        if report.step % every == 0 or report is steps[-1]:
            shown = metric_values(report.metrics, "terminal")
            cells = [shown.get(name, "-") for name in names]
            table.add_row(str(report.step + 1), *cells, f"{report.seconds:.2f}")
    for evaluation in directory.metrics.evals():
        table.add_section()
        table.add_row(f"held-out, version {evaluation.policy_version}", f"accuracy {evaluation.accuracy:.3f}")
        for name, value in source_rows(evaluation):
            table.add_row(escape(f"  {name}"), value)
    return table


def write_html(directory: RunDirectory) -> Path:
    """Write `report.html`: the summary and the curves of the report view, without scripts or external resources."""
    steps = directory.metrics.steps()
    summary = directory.summary()
    rows = _summary_rows(summary) if summary else [("steps", f"{len(steps)} (not finished)")]
    for report in directory.metrics.evals():
        name = f"held-out accuracy, version {report.policy_version}"
        rows.append((name, f"{report.accuracy:.3f} of {report.num_prompts}"))
        rows += [(f"{name}, {source}", value) for source, value in source_rows(report)]
    curves = [spec.name for spec in metrics_of("report") if all(spec.name in step.metrics for step in steps)]
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    charts = "".join(_curve(steps, name) for name in curves)
    path = directory.path / "report.html"
    title = html.escape(directory.run_id)
    write_atomic(
        path,
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1><table>{cells}</table>{charts}</html>",
    )
    return path


def _summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary.seconds_by_phase.items())
    rows = [
        ("steps", str(summary.steps)),
        (
            "reward, mean of first 10 → last 10 steps",
            f"{summary.reward_first:.3f} → {summary.reward_last:.3f}",
        ),
    ]
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        accuracies = f"{summary.accuracy_before:.3f} → {summary.accuracy_after:.3f}"
        rows.append(("held-out accuracy, before → after", accuracies))
    return [
        *rows,
        ("seconds", f"{summary.seconds:.1f}"),
        ("tokens per second", f"{summary.tokens_per_second:,.0f}"),
        ("seconds by phase", phases),
        ("store bytes at the end", str(summary.store_bytes_at_end)),
        ("Prefect UI", summary.prefect_ui),
    ]


def _curve(steps: list[StepReport], name: str) -> str:
    values = [step.metrics[name] for step in steps]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    across = (WIDTH - MARGIN) / max(len(values) - 1, 1)
    points = " ".join(
        f"{MARGIN + index * across:.1f},{HEIGHT - 20 - (value - low) / span * (HEIGHT - 30):.1f}"
        for index, value in enumerate(values)
    )
    return (
        f'<h2>{html.escape(name)}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(name)} by step">'
        f'<line x1="{MARGIN}" y1="{HEIGHT - 20}" x2="{WIDTH}" y2="{HEIGHT - 20}"/>'
        f'<text x="0" y="14">{high:.4g}</text><text x="0" y="{HEIGHT - 20}">{low:.4g}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 4}">step 1</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">{len(values)}</text>'
        f'<polyline points="{points}"/></svg>'
    )
