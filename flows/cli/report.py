"""`sluice runs` and `sluice report`: runs in the terminal, and the page of one."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flows.cli.terminal import plain_table
from flows.ui.progress import metric_values, source_rows, summary_rows
from infra.storage.run_list import RunStatus, list_runs
from infra.storage.runs import RunDirectory
from schemas.metric_catalog import metrics_of
from schemas.step import RunSummary

ONE_MINUTE, ONE_HOUR, ONE_DAY = 60, 3600, 86400


def write_page(console: Console, run: str, runs_dir: str, out: Path | None) -> None:
    """Print a run's metrics and write its report.

    Raises:
        RunError: There is no such run, it has no finished step, or the page can't be written.
    """
    from flows.report.run import write_report  # here, since plotly is not needed for the other functions

    directory = RunDirectory.open(run, runs_dir)
    if directory.metrics.num_steps():
        console.print(render_table(directory))  # first: a run that one may only read has no room for the page
    console.print(f"wrote {write_report(directory, out)}", soft_wrap=True)


def print_runs(console: Console, runs_dir: str, *, as_json: bool) -> None:
    """Print the runs of a folder as a table or as JSON."""
    runs = list_runs(runs_dir)
    if as_json:
        console.print_json(data=[run.model_dump() for run in runs])
    elif runs:
        console.print(render_runs(runs, time.time()))
    else:
        console.print(f"{runs_dir.rstrip('/')}/ holds no runs", soft_wrap=True)


def render_summary(summary: RunSummary, place: str) -> Table:
    """Return a finished run's summary as a table."""
    table = Table(title=f"run {summary.run_id}", show_header=False, title_justify="left")
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    table.add_row("Prefect UI", summary.prefect_ui)
    table.add_row("files", place)
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
        table.add_row(f"held-out, version {evaluation.policy_version}", str(evaluation))
        for name, value in source_rows(evaluation):
            table.add_row(escape(f"  {name}"), value)
    return table


def render_runs(runs: Sequence[RunStatus], now: float) -> Table:
    """Return a table of runs; `now` is the Unix time to which ages refer."""
    table = plain_table(left=0)
    table.add_column("run", overflow="fold", min_width=max(len(run.run_id) for run in runs))
    figures = ["reward", *(["loss"] if any(run.loss is not None for run in runs) else []), "accuracy"]
    for name in ("state", "step", *figures, "age", "updated"):
        table.add_column(name, no_wrap=True)
    has_forks = any(run.forked_from for run in runs)
    if has_forks:
        table.add_column("from", justify="left", overflow="fold")
    for run in runs:
        table.add_row(
            Text(run.run_id),
            Text(run.state, style={"running": "green", "unreadable": "red"}.get(run.state, "")),
            "-" if run.step is None else f"{run.step}/{run.steps}",
            *("-" if (value := getattr(run, name)) is None else f"{value:.3f}" for name in figures),
            *("-" if moment is None else _age(now - moment) for moment in (run.started_at, run.updated_at)),
            *([run.forked_from or ""] if has_forks else []),
        )
    return table


def _age(seconds: float) -> str:
    for unit, size in (("d", ONE_DAY), ("h", ONE_HOUR), ("min", ONE_MINUTE)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
