"""Where a run's workers compute, and what those that take turns on a GPU move out of its memory."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from schemas.base import Frozen

Device = Literal["cpu", "cuda"]
EngineTag = Literal["weights", "cache"]  # what an engine sleeps and wakes by
Part = Literal["weights", "cache", "optimizer", "gradients"]  # of a worker's device memory
GpuPhase = Literal["rollout", "scoring", "update"]
PartBytes = dict[Part, NonNegativeInt]


class WorkerSlot(Frozen):
    """The place of one worker, decided by the driver."""

    worker: str
    """The worker's role and number, e.g. `policy-0`."""

    node: str
    """Ray's id of the node."""

    address: str
    """The node's address."""

    device: Device
    """What the worker computes on."""

    num_gpus: NonNegativeInt = 0
    """On CUDA, its GPUs: one, or those of an engine with tensor parallelism."""

    sharing: PositiveInt = 1
    """Workers of this role on the node, which compute at the same time and share its cores."""

    owner: str = ""
    """Who started the run: `user@machine`."""


class WorkerPlace(Frozen):
    """Where a worker computes, as it says itself."""

    worker: str
    node: str
    """The node's address, and the beginning of Ray's id of it."""

    device: str
    threads: PositiveInt


class ActorInfo(Frozen):
    """One process of a run, as it describes itself."""

    address: str
    gpus: tuple[str, ...]
    memory_bytes: NonNegativeInt
    """Memory that ends with the process."""

    age_seconds: NonNegativeFloat
    driverless_seconds: NonNegativeFloat
    """Seconds since a driver was there."""

    owner: str


class ClusterRun(Frozen):
    """A run that has processes in the Ray cluster; what none of them said is None."""

    run_id: str
    identity: str  # what its processes are named by
    state: Literal["no answer", "driven", "no driver"]
    """`no answer`: its processes are starting, or are too busy to say more."""

    num_processes: NonNegativeInt
    nodes: tuple[str, ...] = ()
    num_gpus: NonNegativeInt = 0
    memory_bytes: NonNegativeInt = 0
    """Memory of its processes, and of its columns."""

    age_seconds: NonNegativeFloat | None = None
    driverless_seconds: NonNegativeFloat | None = None
    owner: str = ""


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
