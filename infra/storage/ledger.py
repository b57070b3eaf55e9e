"""A run's ledger: the committed results of its steps' stages.

format.json                                                 the format of keys and results
step-000007/advantage-<digest>-<store incarnation>          one stage's result, as Prefect persists it
"""

from pydantic import PositiveInt
from pydantic_core import from_json

from infra.storage.folder import Folder, read_record
from schemas.base import Frozen
from schemas.config.changes import sampling_digest, scoring_digest
from schemas.errors import RunError
from schemas.step import PolicyHandle, RunHandle

_PREFIX = "step-"
# To be raised with every change after which an older entry must not be used: of a key, of a stage's result or of its
# meaning, of the columns that it refers to.
FORMAT = 4
_FOLDER, _FORMAT_FILE = "ledger", "format.json"
_SAMPLING = ("rollout", "put")  # the stages whose results don't depend on how a run scores and plans


def step_folder(step: int) -> str:
    """Return the name of a step's folder; names sort by step."""
    return f"{_PREFIX}{step:06d}"


def step_number(folder: str) -> int | None:
    """Return the step that a folder's name stands for; None if it isn't the name of a step's folder."""
    number = folder.removeprefix(_PREFIX)
    return int(number) if folder.startswith(_PREFIX) and number.isdecimal() else None


class LedgerFormat(Frozen):
    """The content of `format.json`. A ledger without one is of format 1."""

    format: PositiveInt


def stage_key(run: RunHandle, policy: PolicyHandle, stage: str) -> str:
    """Return the name of one stage's entry, relative to the ledger.

    The digest of those settings on which its result depends is part of it: after a change of others, it is used again.
    So is the store's incarnation: a stage's output is in the column store, so an entry of another incarnation must not
    match.
    """
    digest = sampling_digest(run.config) if stage in _SAMPLING else scoring_digest(run.config)
    return f"{step_folder(policy.step)}/{stage}-{digest}-{run.store_incarnation}"


def update_key(run: RunHandle, policy: PolicyHandle, stage: str) -> str:
    """Return the name of the update's entry: the worker group's incarnation is part of it.

    A worker group that was restarted has lost the update, so an entry of another incarnation must not match.
    """
    return f"{stage_key(run, policy, stage)}-{policy.incarnation}"


class Ledger:
    """The entries of one run, in a folder per step."""

    def __init__(self, run: Folder, run_id: str) -> None:
        self._folder, self._run_id = run.within(_FOLDER), run_id

    @property
    def place(self) -> str:
        """Its local path or URL."""
        return self._folder.place

    def create(self) -> None:
        """Make an empty ledger of this version's format, or give an emptied one its format."""
        self._folder.write(_FORMAT_FILE, LedgerFormat(format=FORMAT).model_dump_json().encode())

    def steps(self) -> list[int]:
        """Return the steps that have entries, in order."""
        numbers = [step_number(name) for name in self._folder.subfolders()]
        return sorted(number for number in numbers if number is not None)

    def is_committed(self, key: str) -> bool:
        """Return whether there is a whole entry of this name: Prefect runs a stage again whose entry was cut off."""
        try:
            return (content := self._folder.read(key)) is not None and from_json(content) is not None
        except ValueError:
            return False

    def sync(self, key: str) -> None:
        """Make an entry, which Prefect has written in place, survive a power failure."""
        self._folder.sync(key)

    def drop_step(self, step: int) -> None:
        """Delete a step's entries, if there are any."""
        self._folder.remove_folder(step_folder(step))

    def drop_failures(self) -> None:
        """Delete the errors of failed flows, which Prefect writes here under random names; nothing reads them."""
        for name in self._folder.sizes():
            if "/" not in name and name != _FORMAT_FILE:
                self._folder.remove(name)

    def is_empty(self) -> bool:
        """Return whether there is nothing in it, not even its format."""
        return not self._folder.sizes()

    def format(self) -> int:
        """Return the format that the ledger was written in.

        Raises:
            RunError: `format.json` is damaged.
        """
        advice = "remove it, and the steps after the newest checkpoint are run again"
        found = read_record(self._folder, _FORMAT_FILE, LedgerFormat, advice)
        return 1 if found is None else found.format

    def is_outdated(self) -> bool:
        """Return whether the ledger is of an older format, so that its entries must not be used.

        Raises:
            RunError: The ledger is of a newer format, or `format.json` is damaged.
        """
        found = self.format()
        if found > FORMAT:
            raise RunError(
                f"run {self._run_id} has a ledger of format {found}, but this Sluice reads only formats up to "
                f"{FORMAT}: resume the run with the newer Sluice that wrote it, or start a new run"
            )
        return found < FORMAT

    def renew(self) -> None:
        """Delete all entries, and change the ledger to this version's format."""
        for step in self.steps():
            self.drop_step(step)
        self.create()  # last: if this process is killed before, the entries are deleted the next time
