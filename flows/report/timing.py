"""The panels of time and bytes: where a step's seconds go, how fast its phases are, and what the column store holds."""

from flows.report.charts import Line, line_chart, stacked_bars, timeline
from flows.report.page import Chart, Panel
from flows.report.record import RunRecord
from infra.storage.profiles import find_traces
from schemas.metric_catalog import METRICS, find_metric

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
