"""`metrics.jsonl`: the reports of a run's finished steps and evaluations, and when it was started and resumed."""

import json
from typing import Any

from infra.storage.lines import Lines
from schemas.step import EvalReport, RunEvent, StepReport


class MetricsFile:
    """One line per finished step, evaluation and event, in order. A step is finished once its line is in the file.

    Args:
        lines: The file.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def __str__(self) -> str:
        return str(self._lines)

    def append_step(self, report: StepReport) -> None:
        """Append a finished step's report."""
        self._append({"kind": "step", **report.model_dump()})

    def append_eval(self, report: EvalReport) -> None:
        """Append an evaluation's report."""
        self._append({"kind": "eval", **report.model_dump()})

    def append_event(self, event: RunEvent) -> None:
        """Append a start, resume or restart of the run."""
        self._append(event.model_dump())

    def steps(self) -> list[StepReport]:
        """Return the reports of the finished steps."""
        return [StepReport.model_validate(row) for row in self._reports("step")]

    def step(self, number: int) -> StepReport | None:
        """Return the report of one step; None if it is not finished."""
        return next((report for report in self.steps() if report.step == number), None)

    def last_steps(self, first: int) -> list[StepReport]:
        """Return the reports of the finished steps from `first` on; only the end of the file is read."""
        reports: list[StepReport] = []
        for line in self._lines.read_backwards():
            if line.startswith(_beginning("step")):
                row = json.loads(line)
                if row["step"] < first:
                    break
                reports.append(StepReport.model_validate(_without_kind(row)))
        return reports[::-1]

    def evals(self) -> list[EvalReport]:
        """Return the reports of the evaluations."""
        return [EvalReport.model_validate(row) for row in self._reports("eval")]

    def events(self) -> list[RunEvent]:
        """Return the run's starts, resumes and restarts."""
        return [RunEvent.model_validate(row) for row in self._rows() if row["kind"] not in ("step", "eval")]

    def modified(self) -> float | None:
        """Return when the last line was written, Unix time; None if there is none."""
        return self._lines.modified()

    def copy_from(self, source: "MetricsFile", num_steps: int) -> None:
        """Replace all reports by another run's: of its first `num_steps` steps, and of evaluations up to their end."""
        rows = (
            row
            for row in source._rows()
            if (row["kind"] == "step" and row["step"] < num_steps)
            or (row["kind"] == "eval" and row["policy_version"] <= num_steps)
        )
        self._lines.replace(json.dumps(row) + "\n" for row in rows)

    def truncate(self, num_steps: int) -> None:
        """Drop the reports from after the first `num_steps` steps, which will be run again; events are kept."""
        kept = [
            row
            for row in self._rows()
            if not (row["kind"] == "step" and row["step"] >= num_steps)
            and not (row["kind"] == "eval" and row["policy_version"] > num_steps)
        ]
        self._lines.replace(json.dumps(row) + "\n" for row in kept)

    def _append(self, row: dict[str, Any]) -> None:
        self._lines.append(json.dumps(row) + "\n")

    def _reports(self, kind: str) -> list[dict[str, Any]]:
        """Return the rows of a kind, without the kind; the others are not parsed, as a long run has many."""
        beginning = _beginning(kind)
        return [_without_kind(json.loads(line)) for line in self._lines.read() if line.startswith(beginning)]

    def _rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines.read()]


def _beginning(kind: str) -> str:
    """Return what the lines of a kind begin with."""
    return json.dumps({"kind": kind})[:-1]


def _without_kind(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in row if name != "kind"}
