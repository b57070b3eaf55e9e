"""A run's ledger: the committed results of its steps' stages.

format.json                                                 the format of keys and results
step-000007/advantage-<config digest>-<store incarnation>   one stage's result, as Prefect persists it
"""

import shutil
from pathlib import Path

from pydantic import PositiveInt, ValidationError

from infra.storage.atomic import write_atomic
from infra.storage.step_folders import step_folder, step_number
from schemas.base import Frozen
from schemas.errors import RunError
from schemas.step import PolicyHandle, RunHandle

# To be raised with every change after which an older entry must not be used: of a key, of a stage's result or of its
# meaning, of the columns that it refers to.
FORMAT = 2
_FORMAT_FILE = "format.json"


class LedgerFormat(Frozen):
    """The content of `format.json`. A ledger without one is of format 1."""

    format: PositiveInt


def stage_key(run: RunHandle, policy: PolicyHandle, stage: str) -> str:
    """Return the name of one stage's entry, relative to the ledger.

    The config's digest is part of it, and the store's incarnation: a stage's output is in the column store, so an
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
        path: The ledger's folder, in the run's directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Make an empty ledger of this version's format."""
        self.path.mkdir(exist_ok=True)
        self._write_format()

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

    def drop_failures(self) -> None:
        """Delete the errors of failed flows, which Prefect writes here under random names; nothing reads them."""
        for path in self.path.glob("*"):
            if path.is_file() and path.name != _FORMAT_FILE:
                path.unlink(missing_ok=True)

    def format(self) -> int:
        """Return the format that the ledger was written in.

        Raises:
            RunError: `format.json` is damaged.
        """
        path = self.path / _FORMAT_FILE
        try:
            return LedgerFormat.model_validate_json(path.read_text()).format if path.exists() else 1
        except ValidationError as error:
            raise RunError(
                f"{path} is damaged: {error.errors()[0]['msg']}; remove it, and the steps after the newest checkpoint "
                "are run again"
            ) from None

    def is_outdated(self) -> bool:
        """Return whether the ledger is of an older format, so that its entries must not be used.

        Raises:
            RunError: The ledger is of a newer format, or `format.json` is damaged.
        """
        found = self.format()
        if found > FORMAT:
            raise RunError(
                f"run {self.path.parent.name} has a ledger of format {found}, but this Sluice reads only formats up to "
                f"{FORMAT}: resume the run with the newer Sluice that wrote it, or start a new run"
            )
        return found < FORMAT

    def renew(self) -> None:
        """Delete all entries, and change the ledger to this version's format."""
        for step in self.steps():
            self.drop_step(step)
        self.path.mkdir(exist_ok=True)
        self._write_format()  # last: if this process is killed before, the entries are deleted the next time

    def _write_format(self) -> None:
        write_atomic(self.path / _FORMAT_FILE, LedgerFormat(format=FORMAT).model_dump_json())
