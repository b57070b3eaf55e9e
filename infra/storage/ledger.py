"""A run's ledger: the committed results of its steps' stages.

step-000007/advantage-<config digest>-<store incarnation>   one stage's result, as Prefect persists it
"""

import shutil
from pathlib import Path

from infra.storage.step_folders import step_folder, step_number
from schemas.step import PolicyHandle, RunHandle


def stage_key(run: RunHandle, policy: PolicyHandle, stage: str) -> str:
    """Return the name of one stage's entry, relative to the ledger.

    The config's digest is part of it, and the store's incarnation: a stage's output lies in the column store, so an
    entry of another incarnation must not match.
    """
    return f"{step_folder(policy.step)}/{stage}-{run.config.digest}-{run.store_incarnation}"


def update_key(run: RunHandle, policy: PolicyHandle, stage: str) -> str:
    """Return the name of the update's entry: the worker group's incarnation is part of it.

    A worker group that was restarted has lost the update, so an entry of another incarnation must not match.
    """
    return f"{stage_key(run, policy, stage)}-{policy.incarnation}"


class Ledger:
    """The entries of one run, in a folder per step.

    Args:
        path: The ledger's folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """Return the steps that have entries, in order."""
        numbers = [step_number(path.name) for path in self.path.glob("*")]
        return sorted(number for number in numbers if number is not None)

    def is_committed(self, key: str) -> bool:
        """Return whether there is an entry of this name."""
        return (self.path / key).exists()

    def drop_step(self, step: int) -> None:
        """Delete a step's entries, if there are any."""
        shutil.rmtree(self.path / step_folder(step), ignore_errors=True)
