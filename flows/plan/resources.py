"""What a planned run takes of its machines: memory by worker and phase, network, time, and the limit that binds."""

from collections.abc import Callable

import psutil
import torch

from flows.plan.advice import find_fix, largest_that_fits
from flows.plan.calibrate import measure_rates
from flows.plan.footprint import Footprint, measure_step
from flows.plan.limits import Limit, binding, find_limits, shared_phases
from flows.plan.nodes import HostMemory, host_memory
from flows.plan.placement import place
from flows.plan.simulate import LengthShape, SimulatedStep, simulate_step
from flows.plan.speed import StepSeconds, peak_rates, step_seconds
from flows.plan.traffic import Transfer, step_traffic
from flows.plan.workers import ModelMemory, WorkerMemory, kv_cache, worker_memory
from infra.datasets import PromptDataset
from infra.workers.layout import gpus_wanted
from rl_core.planning.hardware import Cluster, find_gpu_kind, format_bytes, parse_cluster
from rl_core.planning.memory import PHASES, PhaseBytes
from schemas.base import Frozen
from schemas.config.run import RunConfig
from schemas.errors import ConfigError

__all__ = ["Resources", "plan_resources", "this_machine"]


class Resources(Frozen):
    """What a run takes of a cluster."""

    cluster: Cluster
    workers: tuple[WorkerMemory, ...]
    shared: PhaseBytes | None  # of a GPU that a worker of each role shares
    host: HostMemory
    traffic: tuple[Transfer, ...]
    seconds: StepSeconds | None  # None: no rates are known
    limits: tuple[Limit, ...]
    excess: str  # what does not fit, and what to change; empty if the run fits
    warnings: tuple[str, ...]

    @property
    def binding(self) -> Limit:
        """The limit that binds first, see `limits.binding`."""
        return binding(self.limits)

    @property
    def exceeded(self) -> tuple[Limit, ...]:
        """The memory of the machines that the run exceeds; `Footprint.check_capacity` is for the store."""
        return tuple(limit for limit in self.limits if limit.is_exceeded and limit.name != "store")

    def check(self) -> None:
        """Check that the run fits the memory of a cluster that was asked for; of this machine, it is a warning.

        Raises:
            ConfigError: It doesn't fit.
        """
        if self.excess and not self.cluster.is_here:
            raise ConfigError(self.excess)


def plan_resources(
    config: RunConfig,
    footprint: Footprint,
    *,
    shape: LengthShape,
    fill: float,
    data: PromptDataset | None = None,
    cluster: str | None = None,
    calibrate: bool = False,
    utilization: float = 0.4,
) -> Resources:
    """Return what a run takes.

    Args:
        config: The run, checked by `flows.preflight.check`.
        footprint: Its step.
        shape: The distribution of the response lengths.
        fill: Their mean, as a fraction of `rollout.max_response_tokens`.
        data: The training prompts; None loads them.
        cluster: The cluster, see `parse_cluster`; None: this machine.
        calibrate: Whether to measure rates on this machine.
        utilization: The fraction of a GPU's published peaks that is reached.

    Raises:
        UserError: The model is not usable, the cluster has too few GPUs or is unknown, or options contradict.
    """
    if cluster is not None and calibrate:
        raise ConfigError("--calibrate measures this machine, --cluster plans for another one; leave one of them out")
    machines = this_machine() if cluster is None else parse_cluster(cluster)
    return _plan_and_advise(config, footprint, machines, shape, fill, data, calibrate, utilization)


def plan_for_gpu(config: RunConfig, footprint: Footprint, gpu_bytes: int) -> str:
    """Return, in a sentence, what fits GPUs of this size that are too small for a run, as far as a plan can tell."""
    host_bytes = 2**60  # it was not too small
    machines = Cluster(
        name="the GPU", num_nodes=1, gpus_per_node=gpus_wanted(config), gpu_bytes=gpu_bytes, host_bytes=host_bytes
    )
    try:
        planned = _plan_and_advise(config, footprint, machines, "lognormal", 0.5)
    except ConfigError as error:  # not even an engine's weights fit
        return str(error)
    used = next(limit for limit in planned.limits if limit.name == "GPU memory")
    return planned.excess or (
        f"by the plan the run takes {format_bytes(used.used)} of {format_bytes(gpu_bytes)} ({used.where}): CUDA's own "
        "memory, fragmentation or other processes take the rest"
    )


def _plan_and_advise(
    config: RunConfig,
    footprint: Footprint,
    machines: Cluster,
    shape: LengthShape,
    fill: float,
    data: PromptDataset | None = None,
    calibrate: bool = False,
    utilization: float = 1.0,
) -> Resources:
    step = simulate_step(config, shape, fill, data)
    planned = _plan(config, footprint, step, machines, calibrate, utilization)
    if not planned.exceeded:
        return planned

    def fits(changed: RunConfig) -> bool:
        changed_footprint = measure_step(changed, shape, fill, data)
        changed_step = simulate_step(changed, shape, fill, data)
        return not _plan(changed, changed_footprint, changed_step, machines, False, utilization).exceeded

    return planned.replace(excess=_describe(planned, _largest(config, planned, fits), find_fix(config, machines, fits)))


def _plan(
    config: RunConfig,
    footprint: Footprint,
    step: SimulatedStep,
    machines: Cluster,
    calibrate: bool,
    utilization: float,
) -> Resources:
    placement = place(config, machines)
    model = ModelMemory.of(config, footprint, on_gpus=placement.on_gpus)
    workers = worker_memory(config, footprint, model, machines, placement)
    host = host_memory(config, footprint, model, workers, placement)
    traffic = step_traffic(config, footprint, model, machines, placement)
    rates = peak_rates(config, machines, utilization) if placement.on_gpus else None
    if calibrate:
        rates = measure_rates(config, footprint, model, step)
    seconds = None
    if rates is not None:
        cache = kv_cache(config, workers)
        seconds = step_seconds(config, footprint, model, rates, traffic, placement, cache, step)
    return Resources(
        cluster=machines,
        workers=workers,
        shared=shared_phases(workers, placement),
        host=host,
        traffic=traffic,
        seconds=seconds,
        limits=find_limits(footprint, workers, host, traffic, seconds, machines, placement),
        excess="",
        warnings=model.warnings,
    )


def this_machine() -> Cluster:
    """Return this machine; the peaks of its GPUs are known if their name contains that of a known kind."""
    host_bytes = psutil.virtual_memory().total
    if not torch.cuda.is_available():
        return Cluster(
            name="this machine", num_nodes=1, gpus_per_node=0, gpu_bytes=0, host_bytes=host_bytes, is_here=True
        )
    found = torch.cuda.get_device_properties(0)
    name = find_gpu_kind(found.name)
    count = torch.cuda.device_count()
    own = {"name": "this machine", "gpu_bytes": found.total_memory, "host_bytes": host_bytes, "is_here": True}
    if name is None:
        return Cluster(num_nodes=1, gpus_per_node=count, **own)
    return parse_cluster(f"{count}x{name}").replace(**own)


def _largest(config: RunConfig, resources: Resources, fits: Callable[[RunConfig], bool]) -> str:
    """Return the settings that make the run fit a GPU, each by itself, at their largest; empty if there is none."""
    limit = _most_exceeded(resources)
    if limit.phase is None:
        return ""
    share, engine = None, resources.workers[-1].phases
    if resources.shared is not None and getattr(engine, limit.phase):
        others = max(getattr(resources.shared, phase) - getattr(engine, phase) for phase in PHASES)
        share = 1 - others / resources.cluster.gpu_bytes
    return largest_that_fits(config, limit.phase, share, fits)


def _most_exceeded(resources: Resources) -> Limit:
    return max(resources.exceeded, key=lambda each: each.fraction)


def _describe(resources: Resources, largest: str, fix: str) -> str:
    """Return what is exceeded most, by how much, and the advice."""
    limit, name = _most_exceeded(resources), resources.cluster.name
    return (
        f"{limit.name} ({limit.where}): the run needs {format_bytes(limit.used)}, but {name} has "
        f"{format_bytes(limit.available)}; {largest}{fix}"
    )
