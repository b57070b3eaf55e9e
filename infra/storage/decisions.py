"""`decisions.json`: what people decided when a run paused for approval, by step."""

from math import prod

from pydantic import NonNegativeInt, PositiveFloat, TypeAdapter

from infra.storage.folder import Folder
from schemas.base import Frozen


class Decision(Frozen):
    """The answer after one step. A run that was stopped by it goes on when it is resumed."""

    step: NonNegativeInt
    reason: str  # the limits that the step exceeded
    lr_factor: PositiveFloat = 1.0  # for all later steps
    stops: bool = False


_NAME = "decisions.json"
_FORMAT = TypeAdapter(dict[int, Decision])


class DecisionsFile:
    """The decisions of one run. They are part of what it trains: a step that is run again is not asked about again.

    Args:
        folder: The run's directory, in which the file doesn't exist before the first decision.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def load(self) -> dict[int, Decision]:
        """Return the decisions by step."""
        content = self._folder.read(_NAME)
        return _FORMAT.validate_json(content) if content is not None else {}

    def add(self, decision: Decision) -> None:
        """Add the decision about a step."""
        self._folder.write(_NAME, _FORMAT.dump_json({**self.load(), decision.step: decision}, indent=2))

    def copy_from(self, source: "DecisionsFile", num_steps: int) -> None:
        """Take over another run's decisions about its first `num_steps` steps."""
        kept = {step: decision for step, decision in source.load().items() if step < num_steps}
        if kept or self.load():
            self._folder.write(_NAME, _FORMAT.dump_json(kept, indent=2))

    def lr_scale(self, step: int) -> float:
        """Return the factor on a step's learning rate: the product of what was decided after earlier steps."""
        return prod(decision.lr_factor for decision in self.load().values() if decision.step < step)
