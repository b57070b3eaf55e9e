"""What workers that take turns on a GPU move out of its memory, and back into it."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from schemas.base import Frozen

EngineTag = Literal["weights", "cache"]  # what an engine sleeps and wakes by
Part = Literal["weights", "cache", "optimizer", "gradients"]  # of a worker's device memory
TurnPhase = Literal["rollout", "scoring", "update"]

PartBytes = dict[Part, NonNegativeInt]


class MemoryChange(Frozen):
    """What one call moved out of a worker's device memory or back into it, in bytes by part.

    On a CPU, host memory is the device's: what is moved is copied and counted, but takes as much as before.
    """

    moved: PartBytes = Field(default_factory=dict)  # copied to host memory, or back
    freed: PartBytes = Field(default_factory=dict)  # without a copy; or allocated again, without values
    kept: PartBytes = Field(default_factory=dict)  # what should have been freed, but can't be here
    resident: PartBytes = Field(default_factory=dict)  # what the device holds after the call


class PhaseMemory(Frozen):
    """What all workers moved when a step entered a phase, and what they then held."""

    moved_bytes: NonNegativeInt  # to host memory, or back
    freed_bytes: NonNegativeInt  # without a copy; or allocated again
    kept_bytes: NonNegativeInt  # which an engine can't give up
    resident_bytes: dict[str, NonNegativeInt]  # by role, of its fullest worker: together, what a GPU holds
    seconds: NonNegativeFloat  # of the moves alone

    @classmethod
    def of(cls, changes: Sequence[tuple[str, int, MemoryChange]], seconds: float) -> Self:
        """Combine the changes of workers, each after its role and number; the last one of a worker says what it holds.

        >>> out, back = MemoryChange(moved={"weights": 8}), MemoryChange(moved={"weights": 8}, resident={"weights": 8})
        >>> PhaseMemory.of([("policy", 0, out), ("policy", 1, out), ("policy", 0, back)], 0.5).resident_bytes
        {'policy': 8}
        """
        held: dict[str, dict[int, int]] = {}
        for role, number, change in changes:
            held.setdefault(role, {})[number] = sum(change.resident.values())
        every = [change for *_, change in changes]
        return cls(
            moved_bytes=sum(sum(change.moved.values()) for change in every),
            freed_bytes=sum(sum(change.freed.values()) for change in every),
            kept_bytes=sum(sum(change.kept.values()) for change in every),
            resident_bytes={role: max(values.values()) for role, values in held.items()},
            seconds=seconds,
        )
