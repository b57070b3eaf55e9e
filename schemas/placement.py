"""Where a run's workers compute."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from schemas.base import Frozen

Device = Literal["cpu", "cuda"]


class Slot(Frozen):
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
