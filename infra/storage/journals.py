"""The files of a run's journals: what rollout workers record of the batches of steps whose rows are not stored yet.

journal/step-000007/00003-0001-5e2f.jsonl     step, batch, attempt; in a bucket, a folder of objects

Each attempt at a batch writes a file of its own, so that no line follows one that a kill has cut short, and a worker
that is only believed to be dead writes between nobody's lines. Later attempts have higher numbers.
"""

import os
from collections.abc import Callable
from pathlib import PurePosixPath

from infra.storage.folder import Folder, make_folder
from infra.storage.ledger import step_folder, step_number
from infra.storage.lines import Lines

_FOLDER, _SUFFIX = "journal", ".jsonl"


class JournalFiles:
    """The journals of one run, in a folder per step.

    Args:
        run: The run's directory.
        open_lines: Returns the lines of a name and a suffix in it.
    """

    def __init__(self, run: Folder, open_lines: Callable[[str, str], Lines]) -> None:
        self._run, self._open_lines = run, open_lines

    def attempts(self, step: int, batch: int) -> list[Lines]:
        """Return what the attempts at a batch have written, in their order."""
        return [self._open_lines(name, _SUFFIX) for name in self._names(step, batch)]

    def begin(self, step: int, batch: int) -> Lines:
        """Return the lines of a new attempt at a batch; nothing is written yet."""
        last = max((_attempt(name) for name in self._names(step, batch)), default=0)
        name = f"{_FOLDER}/{step_folder(step)}/{batch:05d}-{last + 1:04d}-{os.urandom(2).hex()}"
        if self._run.is_local:  # not when it is written: what is dropped meanwhile stays away
            make_folder(os.path.dirname(os.path.join(self._run.place, name)))
        return self._open_lines(name, _SUFFIX)

    def steps(self) -> list[int]:
        """Return the steps that have a journal, in order."""
        numbers = [step_number(name) for name in self._run.within(_FOLDER).subfolders()]
        return sorted(number for number in numbers if number is not None)

    def drop(self, step: int) -> None:
        """Delete a step's journals, if there are any."""
        self._run.remove_folder(f"{_FOLDER}/{step_folder(step)}")

    def drop_before(self, first: int) -> None:
        """Delete the journals of the steps before `first`."""
        for step in self.steps():
            if step < first:
                self.drop(step)

    def drop_all(self) -> None:
        """Delete the journals of all steps."""
        self._run.remove_folder(_FOLDER)

    def _names(self, step: int, batch: int) -> list[str]:
        folder = PurePosixPath(_FOLDER, step_folder(step))
        found = {PurePosixPath(name).relative_to(folder).parts[0] for name in self._run.sizes(str(folder))}
        names = sorted(str(folder / name.removesuffix(_SUFFIX)) for name in found if name.startswith(f"{batch:05d}-"))
        return [name for name in names if _attempt(name)]


def _attempt(name: str) -> int:
    """Return the number of an attempt by its file's name; 0 if it is no such name."""
    number = PurePosixPath(name).name.split("-")[1]
    return int(number) if number.isdecimal() else 0
