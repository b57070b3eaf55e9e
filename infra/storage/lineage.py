"""`fork.json`: from which run, and after which step, a run was forked; and which run has run each of its steps.

A fork in the file system of its parent has its past in `parent/<run_id>/`: a run directory of its own, of hard links.
Without one, its past is read where `fork.json` says that the parent is.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import NonNegativeInt

from infra.storage import places
from infra.storage.folder import read_record
from infra.storage.runs import RunDirectory
from schemas.base import Frozen
from schemas.batch import SafeName
from schemas.errors import RunError

PAST = "parent"  # the folder of the run directory that a fork has of its parent
_NAME = "fork.json"


class Fork(Frozen):
    """A run's origin. The steps before `step` are the parent's: their metrics are copied, their columns shared."""

    parent: str  # directory or URL
    run_id: SafeName  # the parent's
    step: NonNegativeInt  # the first step of its own, and the version that it began with
    changes: dict[str, tuple[Any, Any]]  # settings, the parent's and its own values, by dotted key

    def __str__(self) -> str:
        return f"{self.run_id}@{self.step}"


def load_fork(directory: RunDirectory) -> Fork | None:
    """Return a run's origin; None if it wasn't forked.

    Raises:
        RunError: The file is damaged.
    """
    return read_record(directory.folder, _NAME, Fork, "restore it")


def save_fork(directory: RunDirectory, fork: Fork) -> None:
    """Write a run's origin."""
    directory.folder.write(_NAME, fork.model_dump_json(indent=2).encode())


def past_of(directory: RunDirectory, fork: Fork) -> RunDirectory:
    """Return where a fork has what its parent was when it was made; it may have nothing there."""
    return RunDirectory(places.join(places.join(directory.url, PAST), fork.run_id))


def owners(directory: RunDirectory) -> Iterator[tuple[RunDirectory, int]]:
    """Yield a run and its ancestors, the parent first; of each, the first step that it has run itself.

    Raises:
        RunError: An ancestor is gone, or a file is damaged.
    """
    while (fork := load_fork(directory)) is not None:
        yield directory, fork.step
        directory = parent_of(directory, fork)
    yield directory, 0


def owner_of(directory: RunDirectory, step: int) -> RunDirectory:
    """Return the run that has run a step: the run itself or, for a step before it was forked, an ancestor.

    Raises:
        RunError: The ancestor is gone.
    """
    return next(run for run, first in owners(directory) if step >= first)


def owner_of_steps(directory: RunDirectory, first: int, stop: int) -> RunDirectory:
    """Return the run that has run steps `first` to `stop` - 1.

    Raises:
        RunError: They are of several runs, whose settings may differ; or the run is gone.
    """
    for run, start in owners(directory):
        if first >= start:
            return run
        if stop > start:
            raise RunError(
                f"steps {first} to {stop - 1} of run {directory.run_id} are not of one run: those before {start} were "
                f"run before {run.run_id} was forked, and may have other settings; ask for {first}:{start} and "
                f"{start}:{stop}"
            )
    raise AssertionError("the first run of a lineage has all steps from 0 on")


def parent_of(directory: RunDirectory, fork: Fork) -> RunDirectory:
    """Return a fork's parent: what the fork itself has of it, else the run.

    Raises:
        RunError: It is gone.
    """
    past, parent = past_of(directory, fork), RunDirectory(fork.parent)
    found = next((run for run in (past, parent) if run.exists), None)
    if found is None:
        raise RunError(
            f"the steps before {fork.step} of run {directory.run_id} are those of run {fork.run_id}, which is no "
            f"longer in {fork.parent}; move it back there"
        )
    return found
