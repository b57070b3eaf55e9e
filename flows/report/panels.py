"""The panels of a run's report, in the order of the page. A panel without data says why in its note."""

from collections.abc import Sequence
from datetime import UTC, datetime

from flows.report.charts import COLORS, Line, length_heat_map, line_chart
from flows.report.page import Chart, Panel, Table
from flows.report.record import RunRecord
from flows.report.samples import read_samples
from flows.report.timing import performance_panel, store_panel, time_panel
from schemas.catalog import REWARD_PART_PREFIX
from schemas.config.load import flat_values, non_defaults
from schemas.metric_catalog import metric_spec, metrics_of
from schemas.step import RunEvent, SourceReport

SHARED_AXES = {
    "KL and approximate KL": ("kl", "reward/kl", "approx_kl"),
    "clip fractions": ("clip_fraction", "clip_fraction/low", "clip_fraction/high", "clip_fraction/dual"),
}
OF_SOURCES = {"share of the prompts by source": "share", "success rate by source": "success_rate"}
OF_REUSE = ("reuse/groups", "reuse/age")
SOURCE_METRICS = ("mean_at_n", "best_at_n", "maj_at_n")


def run_panels(run: RunRecord) -> list[Panel]:
    """Return the panels of a run's report."""
    return [
        _reward(run),
        _evaluation(run),
        _data(run),
        _lengths(run),
        _stability(run),
        time_panel(run),
        performance_panel(run),
        store_panel(run),
        _samples(run),
        _history(run),
        _configuration(run),
    ]


def metric_title(name: str) -> str:
    """Return a metric's name, as a chart's heading, with its unit unless the name says it."""
    unit = metric_spec(name).unit
    return name if unit in name else f"{name} ({unit})"


def _reward(run: RunRecord) -> Panel:
    steps, rewards = run.series("reward")
    low, high = run.series("reward/p10"), run.series("reward/p90")
    band = [
        Line("10th percentile", *low, COLORS[0], "lower"),
        Line("10th to 90th percentile", *high, COLORS[0], "upper"),
    ]
    mean = Line("mean", steps, rewards, COLORS[0])
    charts = [_chart("reward", [*(band if low[0] else []), mean], run)]
    names = dict.fromkeys(name for report in run.steps for name in report.metrics)
    parts = [name for name in names if name.startswith(REWARD_PART_PREFIX)]
    if parts:
        lines = [Line(name.removeprefix(REWARD_PART_PREFIX), *run.series(name)) for name in parts]
        charts.append(_chart("parts of the reward", lines, run))
    charts += [
        _chart(metric_title(name), [Line(name, *run.series(name))], run)
        for name in ("reward/shaped", "groups/zero_variance")
        if run.series(name)[0]
    ]
    note = "" if low[0] else "An earlier version of Sluice wrote this run: its reward percentiles were not recorded."
    return Panel("Reward", note, charts)


def _evaluation(run: RunRecord) -> Panel:
    title = "Evaluation"
    if not run.evals:
        is_missing = run.config.data.eval_path is None
        reason = "data.eval_path is not set" if is_missing else "none is finished"
        return Panel(title, f"The run has no held-out evaluation: {reason}.")
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
    return Panel(title, "", [_chart(f"held-out accuracy, mean@{n}", lines, run)], [table] if table.rows else [])


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


def _data(run: RunRecord) -> Panel:
    """Chart where the rows come from, if that changes from step to step."""
    names = dict.fromkeys(name for report in run.steps for name in report.metrics if name.startswith("data/"))
    charts = []
    for title, metric in OF_SOURCES.items():
        found = {name: name.removeprefix("data/").removesuffix(f"/{metric}") for name in names if name.endswith(metric)}
        if found:
            lines = [Line(source, *run.series(name)) for name, source in found.items()]
            charts.append(_chart(title, lines, run))
    charts += [
        _chart(metric_title(name), [Line(name, *run.series(name))], run) for name in OF_REUSE if run.series(name)[0]
    ]
    note = "" if charts else "No step has shares of a curriculum, or stored groups."
    return Panel("Data", note, charts)


def _lengths(run: RunRecord) -> Panel:
    histograms = {report.step + 1: report.response_lengths for report in run.steps if report.response_lengths}
    charts = [length_heat_map("share of responses by length", histograms, run.events)] if histograms else []
    charts += [
        _chart(metric_title(name), [Line(name, *run.series(name))], run)
        for name in ("response/tokens", "response/truncated")
    ]
    note = "" if histograms else "An earlier version of Sluice wrote this run: its length distribution is not recorded."
    return Panel("Response length", note, charts)


def _stability(run: RunRecord) -> Panel:
    """Chart what the catalog lists for the report and no other panel shows."""
    shared = {name for names in SHARED_AXES.values() for name in names}
    shown = {"reward", "reward/shaped", "groups/zero_variance", "response/tokens", "response/truncated"}
    charts = [
        _chart(title, [Line(name, *run.series(name)) for name in names if run.series(name)[0]], run)
        for title, names in SHARED_AXES.items()
        if any(run.series(name)[0] for name in names)
    ]
    charts += [
        _chart(metric_title(spec.name), [Line(spec.name, *run.series(spec.name))], run)
        for spec in metrics_of("report")
        if spec.name not in shared | shown and run.series(spec.name)[0]
    ]
    return Panel("Stability", "", charts)


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
        return Panel("Starts and resumes", "An earlier version of Sluice wrote this run: they were not recorded.")
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


def _chart(title: str, lines: Sequence[Line], run: RunRecord) -> Chart:
    return line_chart(title, lines, run.events)


def _time(event: RunEvent) -> str:
    return f"{datetime.fromtimestamp(event.time, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _versions(event: RunEvent) -> str:
    return ", ".join(f"{name} {version}" for name, version in event.versions.items())
