"""`metrics.jsonl`: the reports of a run's finished steps and evaluations, and when it was started and resumed."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from infra.storage.lines import Lines
from schemas.errors import RunError
from schemas.step import EvalReport, RunEvent, StepReport

Report = TypeVar("Report", StepReport, EvalReport)
Parsed = TypeVar("Parsed")

_BEGINNING = '{"kind": "'  # of every line


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
        """Return the reports of the finished steps.

        Raises:
            RunError: A line is damaged. Of every method that reads; an unfinished last line was never committed.
        """
        return self._reports("step", StepReport)

    def step(self, number: int) -> StepReport | None:
        """Return the report of one step; None if it is not finished."""
        return next((report for report in self.steps() if report.step == number), None)

    def last_steps(self, first: int) -> list[StepReport]:
        """Return the reports of the finished steps from `first` on; only the end of the file is read."""
        reports: list[StepReport] = []
        for line in self._lines.read_backwards():
            if line.startswith(_beginning("step")):
                try:
                    report = _parse(line, StepReport)
                except ValueError:
                    self.steps()  # forwards, which tells the line's number
                    raise
                if report.step < first:
                    break
                reports.append(report)
        return reports[::-1]

    def evals(self) -> list[EvalReport]:
        """Return the reports of the evaluations."""
        return self._reports("eval", EvalReport)

    def events(self) -> list[RunEvent]:
        """Return the run's starts, resumes and restarts."""
        return [
            self._checked(number, partial(RunEvent.model_validate, row))
            for number, row in enumerate(self._rows(), start=1)
            if row["kind"] not in ("step", "eval")
        ]

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

    def _reports(self, kind: str, model: type[Report]) -> list[Report]:
        """Return the reports of a kind; lines of others are not parsed, as a long run has many."""
        beginning = _beginning(kind)
        reports = []
        for number, line in enumerate(self._lines.read(), start=1):
            if line.startswith(beginning):
                reports.append(self._checked(number, partial(_parse, line, model)))
            elif not line.startswith(_BEGINNING):
                raise self._damage(number)
        return reports

    def _rows(self) -> list[dict[str, Any]]:
        lines = enumerate(self._lines.read(), start=1)
        return [self._checked(number, partial(_parse_row, line)) for number, line in lines]

    def _checked(self, number: int, parse: Callable[[], Parsed]) -> Parsed:
        """Return what a line is parsed to.

        Raises:
            RunError: It is damaged.
        """
        try:
            return parse()
        except ValueError as error:
            raise self._damage(number) from error

    def _damage(self, number: int) -> RunError:
        return RunError(
            f"{self}, line {number} is damaged: restore that file, or save the weights with `sluice export` and start "
            "a new run from them"
        )


def _beginning(kind: str) -> str:
    """Return what the lines of a kind begin with."""
    return json.dumps({"kind": kind})[:-1]


def _parse(line: str, model: type[Report]) -> Report:
    return model.model_validate({name: value for name, value in _parse_row(line).items() if name != "kind"})


def _parse_row(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict) or "kind" not in row:
        raise ValueError("a line has no kind")
    return row
