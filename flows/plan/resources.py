"""What a planned run takes of its machines: memory by worker and phase, which limit binds first, what to change."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import accumulate, islice
from operator import add, or_
from typing import Literal

import psutil
import torch
from pydantic import NonNegativeInt, PositiveInt

from flows.plan.footprint import Footprint, measure_step
from flows.plan.nodes import HostMemory, host_memory
from flows.plan.workers import ModelMemory, Placement, RewardBytes, WorkerMemory, place, worker_memory
from infra.datasets import PromptDataset
from infra.models.load import max_positions
from infra.workers.layout import gpus_wanted
from rl_core.planning.hardware import Cluster, format_bytes
from rl_core.planning.memory import PhaseBytes
from schemas.base import Frozen
from schemas.config.load import override_config
from schemas.config.rollout import ProcessRollout
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, ModelError

Changes = dict[str, str]  # settings, as overrides of a config
Fits = Callable[[Changes], bool | None]

BUDGET_TOKENS = 64  # the largest token budget that fits is found in these steps
MOST_RANKS_PER_ENGINE_GPU = 4  # policy ranks, beyond which a plan warns
SHARES = 100  # and the largest share of a GPU for an engine, in hundredths


class Limit(Frozen):
    """One limit, in bytes."""

    name: Literal["GPU memory", "host memory", "store"]
    where: str
    used: NonNegativeInt
    available: PositiveInt

    @property
    def fraction(self) -> float:
        """The used part."""
        return self.used / self.available


class Resources(Frozen):
    """What a run takes of a cluster."""

    cluster: Cluster
    workers: tuple[WorkerMemory, ...]
    shared: PhaseBytes | None  # of a GPU on which a worker of each role computes; None if no GPU is shared
    host: HostMemory
    limits: tuple[Limit, ...]  # GPU memory with GPUs only
    fixes: tuple[str, ...] = ()  # settings with each of which a run that does not fit was planned, and fits
    warnings: tuple[str, ...]

    @property
    def binding(self) -> Limit:
        """The limit that binds first: the fullest one."""
        return max(self.limits, key=lambda limit: limit.fraction)

    @property
    def exceeded(self) -> tuple[Limit, ...]:
        """The memory of the machines that the run exceeds; `Footprint.check_capacity` is for the store."""
        return tuple(limit for limit in self.limits if limit.fraction > 1 and limit.name != "store")

    @property
    def verdict(self) -> str:
        """Whether the run fits, the limit that binds first, and what to change."""
        name = self.cluster.name
        if not self.exceeded:
            first = self.binding
            return (
                f"the run fits {name}: {first.name} ({first.where}) binds first, at {first.fraction:.1%} of "
                f"{format_bytes(first.available)}"
            )
        worst = max(self.exceeded, key=lambda limit: limit.fraction)
        machines = "nodes" if worst.name == "host memory" else "GPUs"
        advice = f"no settings that Sluice tried make it fit: use {machines} with more memory, or more of them"
        if self.fixes:
            advice = f"it fits with {'; or with '.join(self.fixes)}"
        return (
            f"{worst.name} ({worst.where}): the run needs {format_bytes(worst.used)}, but {name} has "
            f"{format_bytes(worst.available)}; {advice}"
        )

    def check(self) -> None:
        """Check that the run fits the memory of a cluster that was asked for; of this machine, it is a warning.

        Raises:
            ConfigError: It doesn't fit.
        """
        if self.exceeded and not self.cluster.is_here:
            raise ConfigError(self.verdict)


def plan_resources(
    config: RunConfig,
    footprint: Footprint,
    cluster: Cluster,
    *,
    fill: float = 0.5,
    data: PromptDataset | None = None,
) -> Resources:
    """Return what a run takes, and if it does not fit, what to change.

    Args:
        config: The run, checked by `flows.preflight.check`.
        footprint: Its step.
        cluster: The machines, see `this_machine` and `parse_cluster`.
        fill: The `fill` of the footprint.
        data: The training prompts; None loads them.

    Raises:
        UserError: The model is not usable, or the cluster has too few GPUs.
    """
    reward = RewardBytes.of(config, on_gpus=place(config, cluster).on_gpus)
    planned = _plan(config, footprint, cluster, reward)

    def fits(changes: Changes) -> bool | None:
        """Return whether a run with these changes fits; None: it is refused."""
        try:
            changed = override_config(config, [f"{name}={value}" for name, value in changes.items()], "plan")
            return not _plan(changed, measure_step(changed, fill, data), cluster, reward).exceeded
        except (ConfigError, ModelError):  # such a config is refused, e.g. as the model has no gradient checkpointing
            return None

    return planned.replace(fixes=tuple(_find_fixes(config, planned, fits))) if planned.exceeded else planned


def plan_for_gpu(config: RunConfig, gpu_bytes: int) -> str:
    """Return, in a sentence, what fits GPUs of this size that are too small for a run, as far as a plan can tell."""
    host_bytes = 2**60  # it was not too small
    machines = Cluster(
        name="the GPU", num_nodes=1, gpus_per_node=gpus_wanted(config), gpu_bytes=gpu_bytes, host_bytes=host_bytes
    )
    try:
        planned = plan_resources(config, measure_step(config), machines)
    except ConfigError as error:  # not even an engine's weights fit
        return str(error)
    if planned.exceeded:
        return planned.verdict
    gpu = planned.limits[0]
    return (
        f"by the plan the run takes {format_bytes(gpu.used)} of {format_bytes(gpu_bytes)} ({gpu.where}): CUDA's own "
        "memory, fragmentation or other processes take the rest"
    )


def this_machine() -> Cluster:
    """Return this machine."""
    gpus = torch.cuda.device_count()
    return Cluster(
        name="this machine",
        num_nodes=1,
        gpus_per_node=gpus,
        gpu_bytes=torch.cuda.get_device_properties(0).total_memory if gpus else 0,
        host_bytes=psutil.virtual_memory().total,
        is_here=True,
    )


def _plan(config: RunConfig, footprint: Footprint, cluster: Cluster, reward: RewardBytes | None) -> Resources:
    placement = place(config, cluster)
    model = ModelMemory.of(config, footprint, on_gpus=placement.on_gpus, reward=reward)
    workers = worker_memory(config, footprint, model, cluster, placement)
    host = host_memory(config, footprint, model, workers, placement)
    shared = _shared_phases(workers, placement)
    limits = []
    if placement.on_gpus:
        held = {"colocated": shared} if shared else {worker.role: worker.phases for worker in workers}
        role, phases = max(held.items(), key=lambda each: each[1].peak)
        where = f"{role}, {phases.peak_phase}"
        limits.append(Limit(name="GPU memory", where=where, used=phases.peak, available=cluster.gpu_bytes))
    where = f"node {host.node}, {host.phase}"
    limits += [
        Limit(name="host memory", where=where, used=host.num_bytes, available=cluster.host_bytes),
        Limit(name="store", where="columns of a step", used=footprint.store_bytes, available=footprint.capacity_bytes),
    ]
    warnings = (*model.warnings, *(_idle_gpus(config) if placement.on_gpus else ()))
    return Resources(
        cluster=cluster, workers=workers, shared=shared, host=host, limits=tuple(limits), warnings=warnings
    )


def _idle_gpus(config: RunConfig) -> Iterator[str]:
    """Yield a warning if most of a run's GPUs wait while its few engines sample."""
    engines, ranks, each = config.rollout.num_workers, config.runtime.num_policy_ranks, config.rollout.gpus_per_worker
    if config.sft is None and engines * each * MOST_RANKS_PER_ENGINE_GPU < ranks:
        yield (
            f"{engines * each} GPUs sample for {ranks} policy ranks, which wait for them; raise rollout.num_workers = "
            f"{engines}" + (f" to {ranks}" if config.runtime.placement == "colocated" else "")
        )


def _shared_phases(workers: tuple[WorkerMemory, ...], placement: Placement) -> PhaseBytes | None:
    if not placement.is_colocated:
        return None
    *trained, engine = (worker.phases for worker in workers)
    others = reduce(add, trained)
    return others.loading_after(engine) if placement.time_shares_gpus else others + engine


def _find_fixes(config: RunConfig, planned: Resources, fits: Fits) -> Iterator[str]:
    """Yield the settings that make a run fit, each by itself; if none does, the first ones that do together."""
    outcomes = [(changes, fits(changes)) for changes in _candidates(config, planned)]
    alone = [changes for changes, is_fit in outcomes if is_fit]
    together = accumulate((changes for changes, is_fit in outcomes if is_fit is not None), or_)
    for changes in alone or list(islice(filter(fits, together), 1)):
        if "packing.token_budget" in changes:
            changes |= _largest_budget(config, changes, fits)
        yield " ".join(f"{name}={value}" for name, value in changes.items())


def _candidates(config: RunConfig, planned: Resources) -> Iterator[Changes]:
    """Yield changes, those that cost the least time first."""
    runtime, cluster = config.runtime, planned.cluster
    if not config.model.gradient_checkpointing:
        yield {"model.gradient_checkpointing": "true"}
    if runtime.num_policy_ranks > 1 and runtime.gradient_sync == "last_micro_batch":
        yield {"runtime.gradient_sync": "every_micro_batch"}
    spare = max(0, cluster.num_gpus - gpus_wanted(config))
    if more := spare // runtime.num_policy_replicas * runtime.num_policy_replicas:
        yield {"runtime.num_policy_ranks": str(runtime.num_policy_ranks + more)}
    longest = min(config.max_row_tokens, max_positions(config.model))
    if longest < config.packing.token_budget:
        yield {"packing.token_budget": str(longest)}
    if config.rollout.kind == "transformers":
        one = config.rollout.replace(batch_prompts=1)
        if config.rollout.prompts_per_batch > one.prompts_per_batch:
            yield {"rollout.batch_prompts": "1"}
    if config.model.compute_dtype == "float32":
        yield {"model.compute_dtype": "bfloat16"}
    exceeded = {limit.name: limit.used - limit.available for limit in planned.exceeded}
    if "host memory" in exceeded and config.optim.offload:
        yield {"optim.offload": "false"}
    elif "GPU memory" in exceeded and not config.optim.offload:
        yield {"optim.offload": "true"}
    if "GPU memory" in exceeded and isinstance(config.rollout, ProcessRollout):
        share = config.rollout.gpu_fraction(is_colocated=planned.shared is not None)
        lower = math.floor(SHARES * (share - exceeded["GPU memory"] / cluster.gpu_bytes))
        if lower > 0:
            yield {"rollout.gpu_memory_utilization": f"{lower / SHARES:g}"}


def _largest_budget(config: RunConfig, fitting: Changes, fits: Fits) -> Changes:
    """Return the largest token budget that fits, between that of `fitting` and that of a config that does not fit."""
    least, most = int(fitting["packing.token_budget"]), config.packing.token_budget
    budgets = range(least, most, BUDGET_TOKENS)
    first_too_large = bisect_left(
        budgets[1:], True, key=lambda budget: not fits({**fitting, "packing.token_budget": str(budget)})
    )
    return {"packing.token_budget": str(budgets[first_too_large])}
