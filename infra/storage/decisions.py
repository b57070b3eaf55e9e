"""`decisions.json`: what people decided when a run paused for approval, by step."""

from math import prod
from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat, TypeAdapter

from infra.storage.atomic import write_atomic
from schemas.base import Frozen


class Decision(Frozen):
    """The answer after one step. A run that was stopped by it goes on when it is resumed."""

    step: NonNegativeInt
    reason: str  # the limits that the step exceeded
    lr_factor: PositiveFloat = 1.0  # for all later steps
    stops: bool = False


_FORMAT = TypeAdapter(dict[int, Decision])


class DecisionsFile:
    """The decisions of one run. They are part of what it trains: a step that is run again is not asked about again.

    Args:
        path: The file, which doesn't exist before the first decision.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[int, Decision]:
        """Return the decisions by step."""
        return _FORMAT.validate_json(self._path.read_text()) if self._path.exists() else {}

    def add(self, decision: Decision) -> None:
        """Add the decision about a step."""
        write_atomic(self._path, _FORMAT.dump_json({**self.load(), decision.step: decision}, indent=2).decode())

    def lr_scale(self, step: int) -> float:
        """Return the factor on a step's learning rate: the product of what was decided after earlier steps."""
        return prod(decision.lr_factor for decision in self.load().values() if decision.step < step)
