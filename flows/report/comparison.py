"""The page that compares several runs: a summary, overlaid curves, and the differences of their configs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.report.alarms import find_alarms
from flows.report.charts import COLORS, Line, line_chart
from flows.report.page import Chart, Panel, Table, write_page
from flows.report.panels import metric_title
from flows.report.record import WINDOW_STEPS, RunRecord
from flows.report.run import read_reportable
from infra.storage import places
from infra.storage.runs import RunDirectory
from schemas.config.load import differences
from schemas.errors import UserError
from schemas.metric_catalog import metrics_of

ABSENT = "–"


def write_comparison(directories: Sequence[RunDirectory], path: Path | None) -> str:
    """Write the comparison of two or more runs to `path`, or next to the first one; return its path or URL.

    Raises:
        RunError: A run has no finished step, or its config is not one of this version of Sluice.
        UserError: A run is named twice, or two runs of different folders have the same id.
    """
    runs = {directory.run_id: read_reportable(directory) for directory in directories}
    if len(runs) < len(directories):
        names = ", ".join(directory.url for directory in directories)
        raise UserError(f"runs to compare need different ids, but these were given: {names}")
    records = list(runs.values())
    changed = differences({run_id: run.config for run_id, run in runs.items()})
    is_same = len({run.metrics_digest for run in records}) == 1
    outcome = "equal metrics in every step" if is_same else "different metrics"
    verdict = f"{len(runs)} runs; config keys that differ: {len(changed)}; {outcome}"
    alarms = [f"{run.run_id}: {alarm}" for run in records for alarm in find_alarms(run)]
    panels = [
        Panel("Summary", tables=[_summary(records)]),
        Panel("Curves", charts=_curves(records)),
        _config_panel(changed, list(runs)),
    ]
    place = str(path) if path else places.join(directories[0].runs_dir, "comparison.html")
    return write_page(place, " · ".join(runs), verdict, alarms, panels)


def _summary(runs: Sequence[RunRecord]) -> Table:
    columns = [dict(_summary_rows(run)) for run in runs]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    return Table(("", *(run.run_id for run in runs)), rows)


def _summary_rows(run: RunRecord) -> Iterator[tuple[str, str]]:
    seconds = sum(report.seconds for report in run.steps)
    yield "state", run.state
    yield "steps", f"{len(run.steps)} of {run.config.steps}"
    yield f"reward, first {WINDOW_STEPS} steps", _shown(run.window("reward", last=False))
    yield f"reward, last {WINDOW_STEPS} steps", _shown(run.window("reward", last=True))
    yield "held-out accuracy, first", _shown(run.evals[0].accuracy if run.evals else None)
    yield "held-out accuracy, last", _shown(run.evals[-1].accuracy if run.evals else None)
    yield "seconds of all steps", f"{seconds:,.1f}"
    yield "tokens per second", f"{sum(report.metrics['tokens'] for report in run.steps) / seconds:,.0f}"
    yield "resumes and restarts", str(sum(event.kind in ("resume", "restart") for event in run.events))
    yield "versions", ", ".join(f"{name} {version}" for name, version in _last_versions(run).items()) or ABSENT
    yield "hash of the config", run.config.digest
    yield "hash of all plans", run.plans_digest
    yield "hash of all metrics", run.metrics_digest


def _last_versions(run: RunRecord) -> Mapping[str, str]:
    return run.events[-1].versions if run.events else {}


def _curves(runs: Sequence[RunRecord]) -> list[Chart]:
    colors = {run.run_id: COLORS[number % len(COLORS)] for number, run in enumerate(runs)}
    names = [spec.name for spec in metrics_of("report") if any(run.series(spec.name)[0] for run in runs)]
    charts = []
    for name in names:
        lines = [Line(run.run_id, *run.series(name), colors[run.run_id]) for run in runs if run.series(name)[0]]
        charts.append(line_chart(metric_title(name), lines))
    evaluated = [
        Line(
            run.run_id,
            [report.policy_version for report in run.evals],
            [report.accuracy for report in run.evals],
            colors[run.run_id],
            has_markers=True,
        )
        for run in runs
        if run.evals
    ]
    if evaluated:
        charts.insert(1, line_chart("held-out accuracy", evaluated))
    seconds = [
        Line(
            run.run_id, [each.step + 1 for each in run.steps], [each.seconds for each in run.steps], colors[run.run_id]
        )
        for run in runs
    ]
    return [*charts, line_chart("seconds per step", seconds)]


def _config_panel(changed: Mapping[str, Mapping[str, Any]], run_ids: Sequence[str]) -> Panel:
    if not changed:
        return Panel("Configuration", "The runs have the same configuration.")
    rows = [(key, *(str(values.get(run_id, ABSENT)) for run_id in run_ids)) for key, values in changed.items()]
    return Panel("Configuration", "The keys whose values differ.", tables=[Table(("key", *run_ids), rows)])


def _shown(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3f}"
