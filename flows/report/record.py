"""What a run's directory holds for a report."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from infra.storage.run_list import RunState, run_state
from infra.storage.runs import RunDirectory
from schemas.base import digest_of
from schemas.config.run import RunConfig
from schemas.step import EvalReport, RunEvent, RunSummary, StepReport, averaged_steps, comparable, mean_of

WINDOW_STEPS = 10  # the last steps that alarms look at


@dataclass(frozen=True)
class RunRecord:
    """The small files of one run, read once."""

    directory: RunDirectory
    config: RunConfig
    state: RunState
    steps: Sequence[StepReport]
    evals: Sequence[EvalReport]  # measured as the newest one
    events: Sequence[RunEvent]
    summary: RunSummary | None

    @classmethod
    def read(cls, directory: RunDirectory) -> Self:
        """Read a run's files.

        Raises:
            RunError: The run's config is not one of this version of Sluice.
        """
        metrics, config = directory.metrics, directory.config()
        return cls(
            directory=directory,
            config=config,
            state=run_state(directory, config),
            steps=metrics.steps(),
            evals=comparable(metrics.evals()),
            events=metrics.events(),
            summary=directory.summary(),
        )

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.directory.run_id

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return a metric's values by step, counted from 1, for the steps that have it."""
        values = [(report.step + 1, report.metrics.get(name, report.telemetry.get(name))) for report in self.steps]
        found = [(step, value) for step, value in values if value is not None]
        return [step for step, _ in found], [value for _, value in found]

    def latest(self, name: str) -> float | None:
        """Return the mean of a metric over the last `WINDOW_STEPS` steps; None if they lack it."""
        return mean_of(self.steps[-WINDOW_STEPS:], name)

    @property
    def num_compared(self) -> int:
        """How many first and last steps are compared."""
        return averaged_steps(len(self.steps))

    def change(self, name: str) -> tuple[float, float] | None:
        """Return the means of a metric over the first and the last `num_compared` steps; None if some lack it."""
        count = self.num_compared
        first, last = mean_of(self.steps[:count], name), mean_of(self.steps[-count:], name)
        return None if first is None or last is None else (first, last)

    @property
    def metrics_digest(self) -> str:
        """A hash of every step's metrics without times: a resumed run has that of an undisturbed one."""
        values = [
            {name: value for name, value in sorted(report.metrics.items()) if not name.endswith("_seconds")}
            for report in self.steps
        ]
        return digest_of(json.dumps(values))

    @property
    def plans_digest(self) -> str:
        """A hash of every step's plan: the same rows in the same updates, ranks and micro-batches have the same."""
        return digest_of("".join(report.plan or "" for report in self.steps))
