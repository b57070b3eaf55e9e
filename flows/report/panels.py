"""The panels of a run's report, in the order of the page. A panel without data says why in its note."""

from collections.abc import Sequence
from datetime import UTC, datetime

from flows.report.charts import COLORS, Line, length_heat_map, line_chart, stacked_bars, timeline
from flows.report.page import Chart, Panel, Table
from flows.report.record import RunRecord
from flows.report.samples import read_samples
from infra.storage.profiles import find_traces
from schemas.catalog import REWARD_PART_PREFIX
from schemas.config.load import flat_values, non_defaults
from schemas.metric_catalog import METRICS, find_metric, metric_spec, metrics_of
from schemas.step import RunEvent, SourceReport

TIMELINE_STEPS = 4
MIB = 2**20
MAX_LINES = 16  # of a chart with one line per worker
MEASURED = {  # each with one line per member of its families
    "tokens per second of a worker, by phase": ("step/<phase>_tokens_per_second",),
    "model FLOPs utilization (MFU), by phase": ("step/<phase>_mfu",),
    "update, seconds per micro-batch": ("update/<part>_seconds", "update/<part>_seconds_max"),
    "packing": ("packing/fill", "packing/imbalance"),
    "engine, rows": ("engine/running", "engine/waiting"),
    "engine, prefilled tokens": ("engine/prefill_tokens",),
    "engine, used fraction of the KV cache": ("engine/cache",),
    "peak memory by worker (MiB)": (
        "memory/<worker>_allocated_bytes",
        "memory/<worker>_reserved_bytes",
        "memory/<worker>_rss_bytes",
    ),
}
SHARED_AXES = {
    "KL and approximate KL": ("kl", "reward/kl", "approx_kl"),
    "clip fractions": ("clip_fraction", "clip_fraction/low", "clip_fraction/high", "clip_fraction/dual"),
}
OF_SOURCES = {"share of the prompts by source": "share", "success rate by source": "success_rate"}
OF_REUSE = ("reuse/groups", "reuse/age")
SOURCE_METRICS = ("mean_at_n", "best_at_n", "maj_at_n")


def time_panel(run: RunRecord) -> Panel:
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
    note = "" if timed else "An earlier version of Sluice wrote this run: when its phases began was not recorded."
    return Panel("Time", note, charts)


def performance_panel(run: RunRecord) -> Panel:
    """Return what the workers measured, and where the traces of the profiler are."""
    names = list(dict.fromkeys(name for report in run.steps for name in report.telemetry))
    charts = [chart for title, families in MEASURED.items() if (chart := _measured(run, title, families, names))]
    traces = find_traces(run.directory)
    note = "" if names else "An earlier version of Sluice wrote this run: its workers' measurements were not recorded."
    if traces:
        note = f"{note} Traces of torch's profiler, for ui.perfetto.dev, in {run.directory.url}: {', '.join(traces)}."
    return Panel("Performance", note.strip(), charts)


def _measured(run: RunRecord, title: str, families: tuple[str, ...], names: list[str]) -> Chart | None:
    """Chart the metrics of some families; None if the run has none of them."""
    specs = {name: find_metric(name)[0] for name in names}
    chosen = [name for family in families for name in names if specs[name] == METRICS[family]][:MAX_LINES]
    unit = MIB if families[0].endswith("_bytes") else 1
    series = {name: run.series(name) for name in chosen}
    lines = [Line(name, steps, [value / unit for value in values]) for name, (steps, values) in series.items()]
    return line_chart(title, lines, run.events) if lines else None


def store_panel(run: RunRecord) -> Panel:
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
