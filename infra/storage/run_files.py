"""The growing and per-step files of a run: its metrics, the decisions of people, plans, and failures of rewards.

`metrics.jsonl` has the reports of finished steps and evaluations, and when the run was started and resumed;
`decisions.json` what people decided when it paused for approval, by step. Plans and failures are kept as long as a
step's columns.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from math import prod
from typing import Any, Generic, TypeVar

from pydantic import NonNegativeInt, PositiveFloat, TypeAdapter, ValidationError

from infra.storage.folder import Folder
from infra.storage.ledger import step_folder
from infra.storage.lines import Lines
from schemas.base import Frozen
from schemas.errors import RunError
from schemas.step import EvalReport, RunEvent, StepReport

Report = TypeVar("Report", StepReport, EvalReport)
Parsed = TypeVar("Parsed")
Content = TypeVar("Content")

_BEGINNING = '{"kind": "'  # of every line
_NAME = "decisions.json"


class MetricsFile:
    """One line per finished step, evaluation and event, in order. A step is finished once its line is in the file."""

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

    def num_steps(self) -> int:
        """Return the number of finished steps; their reports are not parsed."""
        return sum(1 for _ in self._lines_of("step"))

    def last_step(self) -> StepReport | None:
        """Return the report of the newest finished step; only the end of the file is read."""
        return next(self._newest_steps(), None)

    def step(self, number: int) -> StepReport | None:
        """Return the report of one step; None if it is not finished."""
        return next((report for report in self.steps() if report.step == number), None)

    def last_steps(self, first: int) -> list[StepReport]:
        """Return the reports of the finished steps from `first` on; only the end of the file is read."""
        if first <= 0:
            return self.steps()
        return [*takewhile(lambda report: report.step >= first, self._newest_steps())][::-1]

    def _newest_steps(self) -> Iterator[StepReport]:
        for line in self._lines.read_backwards():
            if line.startswith(_beginning("step")):
                try:
                    yield _parse(line, StepReport)
                except ValueError:
                    self.steps()  # forwards, which tells the line's number
                    raise

    def evals(self) -> list[EvalReport]:
        """Return the reports of the evaluations."""
        return self._reports("eval", EvalReport)

    def events(self) -> list[RunEvent]:
        """Return the run's starts, resumes and restarts."""
        reports = tuple(map(_beginning, ("step", "eval")))
        return [
            self._checked(number, partial(RunEvent.model_validate_json, line))
            for number, line in enumerate(self._lines.read(), start=1)
            if not line.startswith(reports)
        ]

    def modified(self) -> float | None:
        """Return when the last line was written, Unix time; None if there is none."""
        return self._lines.modified()

    def copy_from(self, source: "MetricsFile", num_steps: int, *, with_evals: bool = True) -> None:
        """Replace all reports by another run's: of its first `num_steps` steps, and of evaluations up to their end."""
        rows = (
            row
            for row in source._rows()
            if (row["kind"] == "step" and row["step"] < num_steps)
            or (with_evals and row["kind"] == "eval" and row["policy_version"] <= num_steps)
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
        return [self._checked(number, partial(_parse, line, model)) for number, line in self._lines_of(kind)]

    def _lines_of(self, kind: str) -> Iterator[tuple[int, str]]:
        """Yield the numbered lines of a kind; those of others are not parsed, as a long run has many."""
        beginning = _beginning(kind)
        for number, line in enumerate(self._lines.read(), start=1):
            if line.startswith(beginning):
                yield number, line
            elif not line.startswith(_BEGINNING):
                raise self._damage(number)

    def _rows(self) -> list[dict[str, Any]]:
        lines = enumerate(self._lines.read(), start=1)
        return [self._checked(number, partial(_parse_row, line)) for number, line in lines]

    def _checked(self, number: int, parse: Callable[[], Parsed]) -> Parsed:
        """Return what a line is parsed to."""
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


class Decision(Frozen):
    """The answer after one step. A run that was stopped by it goes on when it is resumed."""

    step: NonNegativeInt
    reason: str  # the limits that the step exceeded
    lr_factor: PositiveFloat = 1.0  # for all later steps
    stops: bool = False


_FORMAT = TypeAdapter(dict[int, Decision])


class DecisionsFile:
    """The decisions of one run. They are part of what it trains: a step that is run again is not asked about again.

    Args:
        folder: The run's directory, in which the file doesn't exist before the first decision.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def load(self) -> dict[int, Decision]:
        """Return the decisions by step."""
        content = self._folder.read(_NAME)
        return _FORMAT.validate_json(content) if content is not None else {}

    def add(self, decision: Decision) -> None:
        """Add the decision about a step."""
        self._folder.write(_NAME, _FORMAT.dump_json({**self.load(), decision.step: decision}, indent=2))

    def copy_from(self, source: "DecisionsFile", num_steps: int) -> None:
        """Take over another run's decisions about its first `num_steps` steps."""
        kept = {step: decision for step, decision in source.load().items() if step < num_steps}
        if kept or self.load():
            self._folder.write(_NAME, _FORMAT.dump_json(kept, indent=2))

    def lr_scale(self, step: int) -> float:
        """Return the factor on a step's learning rate: the product of what was decided after earlier steps."""
        return prod(decision.lr_factor for decision in self.load().values() if decision.step < step)


class StepFiles(Generic[Content]):
    """One JSON file of a kind of content per step, such as `plans/step-000007.json` in the run's directory."""

    def __init__(self, folder: Folder, name: str, content: type[Content]) -> None:
        self._folder, self._name, self._format = folder, name, TypeAdapter(content)

    def save(self, step: int, content: Content) -> None:
        """Save a step's file, replacing an earlier one."""
        self._folder.write(self._file(step), self._format.dump_json(content))

    def load(self, step: int) -> Content | None:
        """Return what a step's file holds; None before it was written, and after the step's columns were cleared.

        Raises:
            RunError: The file is not one of this version.
        """
        content = self._folder.read(self._file(step))
        try:
            return self._format.validate_json(content) if content is not None else None
        except ValidationError as error:
            raise RunError(
                f"{self._folder.place}/{self._file(step)} is damaged, or of an older version of Sluice: "
                f"{error.errors()[0]['msg']}; read it with that version, or remove it"
            ) from None

    def drop(self, step: int) -> None:
        """Delete a step's file, if there is one."""
        self._folder.remove(self._file(step))

    def _file(self, step: int) -> str:
        return f"{self._name}/{step_folder(step)}.json"
