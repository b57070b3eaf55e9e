"""Rows: the reports of steps and evaluations as flat metrics, named as in the metric catalog."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from infra.storage.run_files import MetricsFile
from schemas.step import EvalReport, SourceReport, StepReport

_SOURCE_METRICS = ("mean_at_n", "best_at_n", "maj_at_n", "reward", "response_tokens", "truncated")

Axis = Literal["step", "eval/step"]


class Row(NamedTuple):
    """One finished step or one evaluation."""

    axis: Axis  # the metric that numbers it
    step: int  # that number; an evaluation of policy version k takes place before step k
    values: dict[str, float]  # by metric; the number comes last


class Position(NamedTuple):
    """The last step and the last evaluation that a sink holds; -1: none."""

    step: int = -1
    evaluation: int = -1

    def includes(self, row: Row) -> bool:
        """Return whether the sink holds a row: it got them in order."""
        return row.step <= (self.step if row.axis == "step" else self.evaluation)

    def after(self, row: Row) -> "Position":
        """Return the position once the sink has got a row."""
        return self._replace(step=row.step) if row.axis == "step" else self._replace(evaluation=row.step)


def step_row(report: StepReport) -> Row:
    """Return a step's metrics, telemetry, times, store usage, traffic, publish, and what shared GPUs moved."""
    values = {
        **report.metrics,
        **report.telemetry,
        "tokens_per_second": report.tokens_per_second,
        "step/seconds": report.seconds,
        **{f"step/{phase}_seconds": seconds for phase, seconds in report.seconds_by_phase.items()},
    }
    if report.store:
        values |= {"store/peak_bytes": report.store.peak_bytes, "store/capacity_bytes": report.store.capacity_bytes}
    for stage, traffic in report.traffic_by_stage.items():
        values |= {f"store/{stage}_put_bytes": traffic.put_bytes, f"store/{stage}_read_bytes": traffic.read_bytes}
    if sent := report.publish:
        parts = {"write": sent.write_seconds, "read": sent.read_seconds, "load": sent.load_seconds}
        values |= {f"publish/{part}_seconds": seconds for part, seconds in parts.items()}
        values["publish/bytes"] = sent.num_bytes
    for turn, memory in report.memory_by_phase.items():
        values |= {
            f"memory/{turn}_moved_bytes": memory.moved_bytes,
            f"memory/{turn}_freed_bytes": memory.freed_bytes,
            f"memory/{turn}_kept_bytes": memory.kept_bytes,
            f"memory/{turn}_resident_bytes": sum(memory.resident_bytes.values()),
            f"memory/{turn}_move_seconds": memory.seconds,
        }
    return Row("step", report.step, {**values, "step": report.step})


def evaluation_row(report: EvalReport) -> Row:
    """Return an evaluation's metrics, overall and by data source."""
    values = {
        "eval/accuracy": report.accuracy,
        **{f"eval/{name}": value for name in ("loss", "reward") if (value := getattr(report, name)) is not None},
        "eval/failed": report.num_failed,
        "eval/seconds": report.seconds,
        **{name: value for source in report.sources for name, value in _source_values(source)},
    }
    return Row("eval/step", report.policy_version, {**values, "eval/step": report.policy_version})


def recorded_rows(metrics: MetricsFile) -> list[Row]:
    """Return the rows of all finished steps and evaluations, in the order in which they took place."""
    rows = [*map(evaluation_row, metrics.evals()), *map(step_row, metrics.steps())]
    return sorted(rows, key=lambda row: row.step)  # stable: an evaluation comes before the step of its number


def _source_values(source: SourceReport) -> Iterator[tuple[str, float]]:
    for name in _SOURCE_METRICS:
        if (value := getattr(source, name)) is not None:  # None: all rewards of the source failed
            yield f"eval/{source.data_source}/{name}", value
