"""The panels of a run's report, in the order of the page.

Each panel of the metric catalog charts its metrics; some have more to show. One without data says why in its note.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import get_args

from flows.report.charts import Line, length_heat_map, line_chart, stacked_bars, timeline
from flows.report.page import Chart, Panel, Table
from flows.report.record import RunRecord
from flows.report.samples import read_samples
from infra.storage.runs import find_traces
from schemas.config.load import flat_values, non_defaults
from schemas.errors import MetricError
from schemas.metric_catalog import MetricSpec, PanelName, charts_of, find_metric
from schemas.step import RunEvent, SourceReport

TIMELINE_STEPS = 4
MIB = 2**20
MAX_LINES = 16  # of a chart with one line per worker
SOURCE_METRICS = ("mean_at_n", "best_at_n", "maj_at_n")
EARLIER = "An earlier version of Sluice wrote this run:"


def run_panels(run: RunRecord) -> list[Panel]:
    """Return the panels of a run's report."""
    return [*(_panel(run, title) for title in get_args(PanelName)), _samples(run), _history(run), _configuration(run)]


def _panel(run: RunRecord, title: PanelName) -> Panel:
    """Return what a panel has of its own, and the charts of its metrics."""
    own = OWN[title](run) if title in OWN else Panel(title)
    charts = [*own.charts, *metric_charts(run, title)]
    return replace(own, charts=charts, note=own.note or ("" if charts else "No step has metrics of this panel."))


def metric_charts(run: RunRecord, panel: PanelName) -> list[Chart]:
    """Return a panel's charts, with a line for each metric or member of a family that the run has."""
    names = dict.fromkeys(name for report in run.steps for name in (*report.metrics, *report.telemetry))
    by_family: dict[str, list[str]] = {}
    for name in names:
        with suppress(MetricError):  # of an earlier version
            by_family.setdefault(find_metric(name)[0].name, []).append(name)
    charts = []
    for specs in charts_of(panel):
        shown = [name for spec in specs for name in by_family.get(spec.name, ())][:MAX_LINES]
        if shown:
            charts.append(_chart(run, [spec for spec in specs if spec.name in by_family], shown))
    return charts


def _chart(run: RunRecord, specs: list[MetricSpec], names: list[str]) -> Chart:
    unit, scale = ("MiB", MIB) if specs[0].unit == "byte" else (specs[0].unit, 1)
    title = ", ".join(spec.name for spec in specs)
    series = {name: run.series(name) for name in names}
    lines = [Line(name, steps, [value / scale for value in values]) for name, (steps, values) in series.items()]
    return line_chart(title if unit in title else f"{title} ({unit})", lines, run.events)


def _length(run: RunRecord) -> Panel:
    histograms = {report.step + 1: report.response_lengths for report in run.steps if report.response_lengths}
    if not histograms:
        return Panel("Response length", f"{EARLIER} its length distribution is not recorded.")
    return Panel("Response length", charts=[length_heat_map("share of responses by length", histograms, run.events)])


def _time_panel(run: RunRecord) -> Panel:
    """Return the seconds per phase of every step, and the timeline of the last few."""
    names = dict.fromkeys(name for report in run.steps for name in report.seconds_by_phase)
    numbers = [report.step + 1 for report in run.steps]
    seconds = {name: [report.seconds_by_phase.get(name, 0.0) for report in run.steps] for name in names}
    charts = [stacked_bars("seconds per step, by phase", numbers, seconds)]
    timed = [report for report in run.steps if report.started_at is not None and report.timeline]
    if timed:
        charts.append(timeline("timeline of the last steps", timed[-TIMELINE_STEPS:]))
    speeds = [report.metrics["tokens"] / report.seconds for report in run.steps]
    charts.append(line_chart("tokens per second", [Line("tokens per second", numbers, speeds)], run.events))
    return Panel("Time", "" if timed else f"{EARLIER} when its phases began was not recorded.", charts)


def _performance(run: RunRecord) -> Panel:
    """Return where the traces of the profiler are."""
    has_any = any(report.telemetry for report in run.steps)
    note = "" if has_any else f"{EARLIER} its workers' measurements were not recorded."
    if traces := find_traces(run.directory):
        note = f"{note} Traces of torch's profiler, for ui.perfetto.dev, in {run.directory.url}: {', '.join(traces)}."
    return Panel("Performance", note.strip())


def _store(run: RunRecord) -> Panel:
    """Return the column store's bytes, each step's traffic, and what publishing the weights took."""
    held = [(report.step + 1, report.store) for report in run.steps if report.store is not None]
    steps = [step for step, _ in held]
    charts = [
        line_chart(
            "column store (MiB)",
            [
                Line("at the end of the step", steps, [usage.num_bytes / MIB for _, usage in held]),
                Line("peak", steps, [usage.peak_bytes / MIB for _, usage in held]),
            ],
            run.events,
        ),
        line_chart("columns put and read per step (MiB)", _traffic(run), run.events),
    ]
    published = [(report.step + 1, report.publish) for report in run.steps if report.publish is not None]
    if not published:
        return Panel("Store and weights", "No step published weights: the rollout workers already held them.", charts)
    numbers = [step for step, _ in published]
    parts = {
        "write": [transfer.write_seconds for _, transfer in published],
        "read": [transfer.read_seconds for _, transfer in published],
        "load": [transfer.load_seconds for _, transfer in published],
    }
    lines = [Line(name, numbers, values) for name, values in parts.items()]
    charts.append(line_chart("publishing weights (seconds)", lines, run.events))
    newest = published[-1][1]
    size, workers = newest.num_bytes / MIB, newest.num_receivers
    note = f"A publish sends {size:,.1f} MiB of weights to {workers} rollout worker(s), by {newest.transport}."
    return Panel("Store and weights", note, charts)


def _traffic(run: RunRecord) -> list[Line]:
    steps = [report.step + 1 for report in run.steps]
    put = [sum(each.put_bytes for each in report.traffic_by_stage.values()) / MIB for report in run.steps]
    read = [sum(each.read_bytes for each in report.traffic_by_stage.values()) / MIB for report in run.steps]
    return [Line("put", steps, put), Line("read", steps, read)]


def _evaluation(run: RunRecord) -> Panel:
    if not run.evals:
        is_missing = run.config.data.eval_path is None
        reason = "data.eval_path is not set" if is_missing else "none is finished"
        return Panel("Evaluation", f"The run has no held-out evaluation: {reason}.")
    versions = [report.policy_version for report in run.evals]
    total = Line("all", versions, [report.accuracy for report in run.evals], has_markers=True)
    names = list(dict.fromkeys(source.data_source for report in run.evals for source in report.sources))
    lines = [total, *(_source_line(run, name) for name in names if len(names) > 1)]
    n = run.evals[-1].samples_per_prompt
    table = Table(
        ("source", "prompts", f"mean@{n}", f"best@{n}", f"maj@{n}", "reward", "failed rewards", "tokens", "truncated"),
        [_source_cells(source) for source in run.evals[-1].sources],
        f"last evaluation, policy version {versions[-1]}",
    )
    losses = [(report.policy_version, report.loss) for report in run.evals if report.loss is not None]
    charts = [line_chart("held-out accuracy" if losses else f"held-out accuracy, mean@{n}", lines, run.events)]
    if losses:
        steps, values = zip(*losses, strict=True)
        charts.insert(0, line_chart("held-out loss (nat)", [Line("all", steps, values, has_markers=True)], run.events))
    others = len(run.directory.metrics.evals()) - len(run.evals)
    note = f"{others} earlier ones had other held-out rows or settings: not shown." if others else ""
    return Panel("Evaluation", note, charts, [table] if table.rows else [])


def _source_line(run: RunRecord, name: str) -> Line:
    found = [
        (report.policy_version, source.mean_at_n)
        for report in run.evals
        for source in report.sources
        if source.data_source == name
    ]
    return Line(name, [version for version, _ in found], [value for _, value in found], has_markers=True)


def _source_cells(source: SourceReport) -> tuple[str, ...]:
    rates = [getattr(source, name) for name in (*SOURCE_METRICS, "reward")]
    shown = ["all rewards failed" if value is None else f"{value:.3f}" for value in rates]
    figures = (str(source.num_failed), f"{source.response_tokens:.1f}", f"{source.truncated:.1%}")
    return (source.data_source, str(source.num_prompts), *shown, *figures)


def _samples(run: RunRecord) -> Panel:
    found = read_samples(run.directory)
    if found.step is None:
        return Panel("Rows", f"No rows to show: {found.reason}.")
    note = (
        f"Of step {found.step + 1}. A token's color is the difference of trainer and engine log-prob: orange where the "
        "trainer gives it more, blue where it gives it less. Point at a token for its figures."
    )
    return Panel("Rows", note, samples=found.samples)


def _history(run: RunRecord) -> Panel:
    if not run.events:
        return Panel("Starts and resumes", f"{EARLIER} they were not recorded.")
    rows = [(_time(event), event.kind, str(event.step + 1), event.reason, _versions(event)) for event in run.events]
    note = (
        "Dotted lines in the charts: gray where a new driver resumed the run, red where workers were restarted, purple "
        "where it was forked from another run, whose steps are before it."
    )
    return Panel("Starts and resumes", note, tables=[Table(("time", "event", "from step", "reason", "versions"), rows)])


def _configuration(run: RunRecord) -> Panel:
    changed = [(key, str(value), str(default)) for key, (value, default) in non_defaults(run.config).items()]
    hashes = [
        ("config", run.config.digest),
        ("plans of all steps", run.plans_digest),
        ("metrics of all steps, without times", run.metrics_digest),
    ]
    whole = [(key, str(value)) for key, value in flat_values(run.config).items()]
    tables = [
        Table(("key", "value", "default"), changed, "settings that are not the default"),
        Table(("hash of", "first 16 hex digits of SHA-256"), hashes, "hashes"),
        Table(("key", "value"), whole, "the whole config", is_folded=True),
    ]
    return Panel("Configuration", run.directory.url, tables=tables)


def _time(event: RunEvent) -> str:
    return f"{datetime.fromtimestamp(event.time, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _versions(event: RunEvent) -> str:
    return ", ".join(f"{name} {version}" for name, version in event.versions.items())


OWN: dict[PanelName, Callable[[RunRecord], Panel]] = {  # what is not a metric
    "Evaluation": _evaluation,
    "Response length": _length,
    "Time": _time_panel,
    "Performance": _performance,
    "Store and weights": _store,
}
