"""The panels of time and bytes: where a step's seconds go, what overlaps, and what the column store holds."""

from flows.report.charts import Line, line_chart, stacked_bars, timeline
from flows.report.page import Panel
from flows.report.record import RunRecord

TIMELINE_STEPS = 4
MIB = 2**20


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
