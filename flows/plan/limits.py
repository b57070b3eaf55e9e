"""The limits of a planned run, and which of them binds first."""

from functools import reduce
from operator import add
from typing import Literal

from pydantic import NonNegativeFloat

from flows.plan.footprint import Footprint
from flows.plan.nodes import HostMemory
from flows.plan.placement import Placement
from flows.plan.speed import StepSeconds
from flows.plan.traffic import Transfer
from flows.plan.workers import WorkerMemory
from rl_core.planning.hardware import Cluster
from rl_core.planning.memory import Phase, PhaseBytes
from schemas.base import Frozen

LimitName = Literal["GPU memory", "host memory", "store", "network", "compute"]


class Limit(Frozen):
    """One limit: memory and store are full at a fraction of 1; network and compute share the time of a step."""

    name: LimitName
    where: str
    phase: Phase | None = None  # of the memory of GPUs
    used: NonNegativeFloat  # bytes, or seconds
    available: NonNegativeFloat  # bytes, or the seconds of the step
    is_time: bool

    @property
    def fraction(self) -> float:
        """The used part."""
        return self.used / self.available

    @property
    def is_exceeded(self) -> bool:
        """Whether the run can't fit."""
        return not self.is_time and self.fraction > 1


def find_limits(
    footprint: Footprint,
    workers: tuple[WorkerMemory, ...],
    host: HostMemory,
    traffic: tuple[Transfer, ...],
    seconds: StepSeconds | None,
    cluster: Cluster,
    placement: Placement,
) -> tuple[Limit, ...]:
    """Return all limits that are known: GPU memory with GPUs only, network and compute with known rates only."""
    limits = []
    if placement.on_gpus:
        limits.append(_gpu_limit(workers, cluster, placement))
    where = f"node {host.node}, {host.phase}"
    limits += [
        Limit(name="host memory", where=where, used=host.num_bytes, available=cluster.host_bytes, is_time=False),
        Limit(
            name="store",
            where="columns of a step",
            used=footprint.store_bytes,
            available=footprint.capacity_bytes,
            is_time=False,
        ),
    ]
    if seconds is not None:
        longest = max(("rollout", "scoring", "update"), key=lambda phase: float(getattr(seconds, phase)))
        slowest = max(traffic, key=lambda transfer: transfer.seconds or 0.0)
        waits = sum(transfer.seconds or 0.0 for transfer in traffic)
        limits += [
            Limit(name="network", where=slowest.name, used=waits, available=seconds.total, is_time=True),
            Limit(name="compute", where=longest, used=seconds.compute, available=seconds.total, is_time=True),
        ]
    return tuple(limits)


def binding(limits: tuple[Limit, ...]) -> Limit:
    """Return the limit that binds first.

    It is the most exceeded one of memory and store; if all fit, whichever of network and compute takes more of a
    step's time; if their rates are not known, the fullest memory.
    """
    memory = max((limit for limit in limits if not limit.is_time), key=lambda limit: limit.fraction)
    times = [limit for limit in limits if limit.is_time]
    if memory.is_exceeded or not times:
        return memory
    return max(times, key=lambda limit: limit.fraction)


def shared_phases(workers: tuple[WorkerMemory, ...], placement: Placement) -> PhaseBytes | None:
    """Return what a GPU holds on which a worker of each role computes; None if no GPU is shared."""
    if not placement.is_colocated:
        return None
    *trained, engine = (worker.phases for worker in workers)
    others = reduce(add, trained)
    return others.loading_after(engine) if placement.takes_turns else others + engine


def _gpu_limit(workers: tuple[WorkerMemory, ...], cluster: Cluster, placement: Placement) -> Limit:
    held: list[tuple[str, PhaseBytes]] = [(worker.role, worker.phases) for worker in workers]
    if (shared := shared_phases(workers, placement)) is not None:
        held = [("colocated", shared)]
    role, phases = max(held, key=lambda each: each[1].peak)
    where = f"{role}, {phases.peak_phase}"
    return Limit(
        name="GPU memory",
        where=where,
        phase=phases.peak_phase,
        used=phases.peak,
        available=cluster.gpu_bytes,
        is_time=False,
    )
