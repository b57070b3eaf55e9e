"""All runs of a folder: which of them are running, and how far each has come."""

from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from infra.storage.driver_lock import is_driven
from infra.storage.lineage import load_fork
from infra.storage.runs import RunDirectory
from schemas.base import Frozen
from schemas.config.run import RunConfig
from schemas.errors import UserError
from schemas.step import mean_of

REWARD_STEPS = 10
_READERS = 8  # runs that are read at the same time

RunState = Literal["running", "finished", "stopped", "unreadable"]


class RunStatus(Frozen):
    """One run, as `sluice runs` shows it. What it doesn't have yet is None."""

    run_id: str
    state: RunState  # stopped: it has no driver, and steps are left; unreadable: another version of Sluice wrote it
    step: int | None = None  # finished steps
    steps: int | None = None  # of its config
    reward: float | None = None  # mean of its last 10 steps; supervised fine-tuning has none
    loss: float | None = None  # the same of its cross-entropy, in supervised fine-tuning
    accuracy: float | None = None  # held out, of its last evaluation
    started_at: float | None = None  # Unix time
    updated_at: float | None = None  # Unix time of its last finished step, evaluation or event
    forked_from: str | None = None  # its parent and the steps that it has of it, as demo@6; None: it is no fork


def list_runs(runs_dir: str) -> list[RunStatus]:
    """Return the runs of a folder, those that were active last first.

    Raises:
        RunError: The folder can't be reached.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        runs = list(readers.map(run_status, RunDirectory.all_in(runs_dir)))
    return sorted(runs, key=lambda run: (run.updated_at or run.started_at or 0.0, run.run_id), reverse=True)


def run_status(directory: RunDirectory) -> RunStatus:
    """Return how far a run has come."""
    try:
        config, num_steps = directory.config(), directory.metrics.num_steps()
        steps = directory.metrics.last_steps(num_steps - REWARD_STEPS)  # the others are not parsed
        evals, events = directory.metrics.evals(), directory.metrics.events()
        fork, state = load_fork(directory), run_state(directory, config)
    except (UserError, ValueError, OSError):  # ValueError: of pydantic or of JSON; OSError: it is another user's
        return RunStatus(run_id=directory.run_id, state="unreadable")
    return RunStatus(
        run_id=directory.run_id,
        state=state,
        step=num_steps,
        steps=config.steps,
        reward=mean_of(steps, "reward"),
        loss=mean_of(steps, "cross_entropy"),
        accuracy=evals[-1].accuracy if evals else None,
        started_at=events[0].time if events else None,
        updated_at=directory.metrics.modified(),
        forked_from=str(fork) if fork else None,
    )


def run_state(directory: RunDirectory, config: RunConfig) -> RunState:
    """Return whether a run has done all of its config's steps, and if not, whether it is being driven."""
    summary = directory.summary()
    if summary is not None and summary.steps >= config.steps:
        return "finished"
    return "running" if is_driven(directory) else "stopped"
