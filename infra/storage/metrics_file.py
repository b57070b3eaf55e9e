"""`metrics.jsonl`: the reports of a run's finished steps and evaluations."""

import json
import os
from pathlib import Path

from infra.storage.atomic import write_atomic
from schemas.step import EvalReport, StepReport


class MetricsFile:
    """One line per finished step and per evaluation, in order. A step is finished once its line is in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append_step(self, report: StepReport) -> None:
        """Append a finished step's report."""
        self._append({"kind": "step", **report.model_dump()})

    def append_eval(self, report: EvalReport) -> None:
        """Append an evaluation's report."""
        self._append({"kind": "eval", **report.model_dump()})

    def steps(self) -> list[StepReport]:
        """Return the reports of the finished steps."""
        return [StepReport.model_validate(row) for row in self._rows("step")]

    def evals(self) -> list[EvalReport]:
        """Return the reports of the evaluations."""
        return [EvalReport.model_validate(row) for row in self._rows("eval")]

    def truncate(self, num_steps: int) -> None:
        """Drop the reports from after the first `num_steps` steps, which will be run again."""
        kept = [{"kind": "step", **report.model_dump()} for report in self.steps() if report.step < num_steps]
        kept += [
            {"kind": "eval", **report.model_dump()} for report in self.evals() if report.policy_version <= num_steps
        ]
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def _append(self, row: dict[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _rows(self, kind: str) -> list[dict[str, object]]:
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # a line cut short by a kill was never committed
            row = json.loads(line)
            if row.pop("kind") == kind:
                rows.append(row)
        return rows
