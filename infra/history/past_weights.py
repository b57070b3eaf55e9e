"""From which checkpoint, and with which stored steps, a run's weights of an earlier version can be had again."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from infra.checkpoints import CheckpointStore, open_checkpoints
from infra.history.kept_run import ranges
from infra.history.stored_step import StoredStep
from infra.storage.lineage import load_fork
from infra.storage.runs import RunDirectory
from infra.stores.files import FsspecColumnStore
from infra.stores.offline import open_own_columns
from schemas.errors import RunError


@dataclass(frozen=True)
class Start:
    """What a version's weights are made of."""

    version: int  # that of the checkpoint; 0 without one: the starting weights
    has_checkpoint: bool  # whether there is a checkpoint of it
    steps: tuple[StoredStep, ...]  # the stored steps whose updates lead from it to the version


class History:
    """The versions that a run has had, as far as its checkpoints and its stored steps give them back.

    Those from before it was forked are of its ancestors' histories: `lineage.owner_of` finds these.

    Raises:
        RunError: It keeps no columns on disk, or has none yet.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.checkpoints: CheckpointStore = open_checkpoints(directory, directory.config().checkpoint)
        last = directory.metrics.last_step()
        self.num_done = last.step + 1 if last is not None else 0
        self._stored: FsspecColumnStore | None = None
        fork = load_fork(directory)
        self._first = fork.step if fork else 0  # to which no step of its own leads
        self._advice = 'a run keeps all columns with store.keep_steps = "all"'

    @property
    def store(self) -> FsspecColumnStore:
        """The run's columns.

        Raises:
            RunError: It keeps none on disk, or has none yet.
        """
        self._stored = self._stored or open_own_columns(self.directory)
        return self._stored

    def start(self, version: int) -> Start:
        """Return what the weights of `version` are made of: the newest undamaged checkpoint up to it, and the updates.

        Raises:
            RunError: The run has had no such version, or a step that is needed isn't kept.
            StoreError: A needed step's columns are damaged.
        """
        if version > self.num_done:
            raise RunError(
                f"run {self.directory.run_id} has finished {self.num_done} steps, so that it has no version {version} "
                "yet; choose a smaller one"
            )
        found = next(self._undamaged(version), None)
        first = self._first if found is None else found
        missing = sorted(set(range(first, version)) - self._kept(range(first, version)))
        if missing or (found is None and first):
            raise self._missing_error(version, first, missing)
        return Start(first, found is not None, tuple(self.steps(first, version)))

    def steps(self, first: int, stop: int) -> list[StoredStep]:
        """Return stored steps, with all of their chunks checked.

        Raises:
            RunError: One isn't finished, or not kept.
            StoreError: A chunk is lost or damaged; the message names it.
        """
        if first < stop and (missing := sorted(set(range(first, stop)) - self._kept(range(first, stop)))):
            raise self._not_kept_error(missing)
        reports = {report.step: report for report in self.directory.metrics.last_steps(first)}
        found = [StoredStep(self.directory, self.store, step, reports.get(step)) for step in range(first, stop)]
        for step in found:
            step.verify()
        return found

    def possible_versions(self) -> list[int]:
        """Return the versions whose weights can be had again, without a look for damage."""
        bases = {*self.checkpoints.complete_versions()} | (set() if self._first else {0})
        kept = self._kept(range(self.num_done))
        found, reachable = [], False
        for version in range(self.num_done + 1):
            reachable = version in bases or (reachable and version - 1 in kept)
            found += [version] if reachable else []
        return found

    def newest_steps(self, limit: int) -> tuple[int, int]:
        """Return the newest steps in a row that can be replayed, at most `limit`: the first, and that after the last.

        Raises:
            RunError: There is none: no step is kept whose weights before it can be had again.
        """
        steps = sorted(self._kept(range(self.num_done)) & set(self.possible_versions()))
        if not steps:
            raise RunError(f"run {self.directory.run_id} keeps no step that can be replayed; {self._advice}")
        last = steps[-1]
        first = next(each for each in range(last, -1, -1) if each - 1 not in steps or each == last - limit + 1)
        return first, last + 1

    def _undamaged(self, version: int) -> Iterator[int]:
        earlier = [each for each in self.checkpoints.complete_versions() if each <= version]
        return (found for found, _ in self.checkpoints.undamaged(earlier, self.checkpoints.verify))

    def _kept(self, steps: Collection[int]) -> set[int]:
        if not steps:
            return set()
        try:
            return {step for step in steps if self.store.load_batch(step) is not None}
        except RunError as error:  # it keeps none
            self._advice = str(error)
            return set()

    def _missing_error(self, version: int, first: int, missing: list[int]) -> RunError:
        origin = f"{'checkpoint' if first else 'version'} {first}"
        lacks, advice = f"lacks the columns of {_steps(missing)}, which would lead to it from {origin}", self._advice
        if not missing:
            lacks = f"has no checkpoint up to it, not even {origin}, with which it began"
            advice = 'a fork keeps that with store.keep_steps = "all"'
        possible = ", ".join(ranges(self.possible_versions())) or "none"
        return RunError(
            f"version {version} of run {self.directory.run_id} can't be had again: it {lacks}; versions that can be: "
            f"{possible}; {advice}"
        )

    def _not_kept_error(self, missing: list[int]) -> RunError:
        unfinished = [step for step in missing if step >= self.num_done]
        if unfinished:
            return RunError(
                f"step {unfinished[0]} of run {self.directory.run_id} is not finished; finished, counted from 0: "
                f"{', '.join(ranges(list(range(self.num_done)))) or 'none'}"
            )
        kept = ", ".join(ranges(sorted(self._kept(range(self.num_done))))) or "none"
        return RunError(
            f"run {self.directory.run_id} doesn't keep the columns of {_steps(missing)}; steps whose columns it keeps: "
            f"{kept}; {self._advice}"
        )


def _steps(numbers: list[int]) -> str:
    return f"{'step' if len(numbers) == 1 else 'steps'} {', '.join(ranges(numbers))}"
