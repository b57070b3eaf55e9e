"""`fork.json`: from which run, and after which step, a run was forked."""

from typing import Any

from pydantic import NonNegativeInt, ValidationError

from infra.storage.runs import RunDirectory
from schemas.base import Frozen
from schemas.batch import SafeName
from schemas.errors import RunError

_NAME = "fork.json"


class Fork(Frozen):
    """A run's origin. The steps before `step` are the parent's: their metrics are copied, their columns aren't."""

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
    if (content := directory.folder.read(_NAME)) is None:
        return None
    try:
        return Fork.model_validate_json(content)
    except ValidationError as error:
        raise RunError(f"{directory.url}/{_NAME} is damaged: {error.errors()[0]['msg']}") from None


def save_fork(directory: RunDirectory, fork: Fork) -> None:
    """Write a run's origin."""
    directory.folder.write(_NAME, fork.model_dump_json(indent=2).encode())
