"""How many workers of each role a run has, and how they are laid out over GPUs or cores.

It is decided from the config and the cluster's size alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from typing import Literal

from schemas.config.reward import ModelReward, WeightedReward, reward_models
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.placement import Device

Role = Literal["policy", "reference", "teacher", "rollout", "reward"]


def worker_name(identity: str, role: Role, number: int = 0) -> str:
    """Return the name under which every process of the cluster finds the worker of the run with that identity."""
    return f"{identity}/{role}-{number}"


def num_workers(config: RunConfig) -> dict[Role, int]:
    """Return how many workers of each role a run has."""
    return {
        "policy": config.runtime.num_policy_ranks,
        "reference": config.runtime.num_reference_ranks if config.needs_reference_worker else 0,
        "teacher": sum(len(numbers) for numbers in teacher_workers(config).values()),
        "rollout": 0 if config.sft is not None else config.rollout.num_workers,
        "reward": sum(model.num_workers for model in reward_models(config.reward)),
    }


def gpus_per_worker(config: RunConfig, role: Role) -> int:
    """Return how many GPUs of one node a worker of a role takes: several for an engine with tensor parallelism."""
    return config.rollout.gpus_per_worker if role == "rollout" else 1


def worker_numbers(config: RunConfig) -> list[tuple[Role, int]]:
    """Return the role and number of each of a run's workers."""
    return [(role, number) for role, count in num_workers(config).items() for number in range(count)]


def teacher_workers(config: RunConfig) -> dict[str, range]:
    """Return the numbers of the workers of each teacher that has its own, by its name."""
    teachers = config.distillation.teachers if config.distillation else {}
    ends = accumulate((teacher.num_workers for teacher in teachers.values()), initial=0)
    numbers = zip(teachers, (range(start, end) for start, end in pairwise(ends)), strict=True)
    return {name: own for name, own in numbers if own}


def frozen_groups(config: RunConfig) -> list[tuple[Role, range]]:
    """Return the groups of ranks that only score: each one's role, and the numbers of its workers."""
    reference = range(num_workers(config)["reference"])
    teachers: list[tuple[Role, range]] = [("teacher", numbers) for numbers in teacher_workers(config).values()]
    return [("reference", reference), *teachers] if reference else teachers


def reward_workers(config: RunConfig) -> list[range]:
    """Return the numbers of the reward workers of each of the config's reward models."""
    ends = list(accumulate(model.num_workers for model in reward_models(config.reward)))
    return [range(start, end) for start, end in pairwise([0, *ends])]


def reward_model_of(config: RunConfig, number: int) -> ModelReward:
    """Return the reward model of a reward worker."""
    models = zip(reward_models(config.reward), reward_workers(config), strict=True)
    return next(model for model, numbers in models if number in numbers)


def decide_device(config: RunConfig, gpus: Sequence[int], num_cpus: float) -> Device:
    """Return what all workers of a run compute on.

    Raises:
        ConfigError: There are too few `gpus` of the nodes, or cores of them all; the message names configs that fit.
    """
    runtime, ranks = config.runtime, config.runtime.num_policy_ranks
    if runtime.device == "cpu" or (runtime.device == "auto" and not sum(gpus)):
        if ranks > num_cpus:
            raise ConfigError(
                f"runtime.num_policy_ranks = {ranks}, but the cluster has {num_cpus:g} cores; lower it, or add nodes"
            )
        return "cpu"
    counts, each = num_workers(config), config.rollout.gpus_per_worker
    advice = f"what fits: {' or '.join(nearest_configs(config, gpus))}; or add nodes"
    if (wanted := gpus_wanted(config)) > sum(gpus):
        of_each = {role: f" with {size} each" for role in counts if (size := gpus_per_worker(config, role)) > 1}
        listed = ", ".join(f"{count} {role}{of_each.get(role, '')}" for role, count in counts.items() if count)
        raise ConfigError(
            f"runtime.device = {runtime.device!r} needs {wanted} GPUs ({listed}; {runtime.placement}), but the "
            f"cluster has {sum(gpus)}; {advice}"
        )
    if (fitting := _num_engines(each, gpus)) < counts["rollout"]:
        raise ConfigError(
            f"rollout.tensor_parallel = {each} needs {each} GPUs of one node for each of {counts['rollout']} engines, "
            f"but the nodes have {', '.join(map(str, gpus))}, enough for {fitting}; {advice}"
        )
    return "cuda"


def gpus_wanted(config: RunConfig) -> int:
    """Return how many GPUs a run's workers take."""
    return sum(bundle_sizes(config))


def bundle_sizes(config: RunConfig) -> list[int]:
    """Return the GPUs of each bundle, all of one node: a worker's, or those that a worker of each role shares."""
    if config.runtime.placement == "colocated":
        return [1] * max(num_workers(config).values())
    return [gpus_per_worker(config, role) for role, _ in worker_numbers(config)]


def bundle_numbers(config: RunConfig) -> dict[tuple[Role, int], int]:
    """Return the number of each worker's bundle: ranks first, which Ray packs on nodes in this order."""
    workers = worker_numbers(config)
    if config.runtime.placement == "colocated":
        return {(role, number): number for role, number in workers}
    return {worker: bundle for bundle, worker in enumerate(workers)}


def nearest_configs(config: RunConfig, gpus: Sequence[int]) -> list[str]:
    """Return the two smallest changes of a config, as settings, with which its workers fit on nodes with these GPUs."""
    counts, each, found = num_workers(config), config.rollout.gpus_per_worker, []
    if config.runtime.placement == "separate":
        if each == 1 and max(counts.values()) <= sum(gpus):
            found.append('runtime.placement = "colocated"')
        smaller = [size for size in range(each - 1, 0, -1) if each % size == 0]
        found += _first(f"rollout.tensor_parallel = {size}" for size in smaller if _fit(counts, size, gpus))
        for role, key in _count_keys(config).items():
            if role == "reference":
                continue
            lower = range(counts[role] - 1, 0, -1)
            found += _first(f"{key} = {count}" for count in lower if _fit({**counts, role: count}, each, gpus))
    elif num_gpus := sum(gpus):
        keys = _count_keys(config)
        over = [role for role, count in counts.items() if count > num_gpus]
        if all(role in keys for role in over):
            found.append(" with ".join(f"{keys[role]} = {num_gpus}" for role in over))
    return [*found, 'runtime.device = "cpu"'][:2]


def spread_over_gpus(config: RunConfig, gpus: Sequence[int]) -> dict[tuple[Role, int], int]:
    """Return the index of each worker's node, given the nodes' GPUs, of which there are enough.

    As Ray does, bundles with more GPUs come first, others in their order.
    """
    free, nodes, sizes = list(gpus), {}, bundle_sizes(config)
    for bundle in sorted(range(len(sizes)), key=lambda bundle: -sizes[bundle]):
        nodes[bundle] = next(node for node, count in enumerate(free) if count >= sizes[bundle])
        free[nodes[bundle]] -= sizes[bundle]
    return {worker: nodes[bundle] for worker, bundle in bundle_numbers(config).items()}


def spread_over_cores(config: RunConfig, cores: Sequence[int]) -> dict[tuple[Role, int], int]:
    """Return the index of each worker's node, given the nodes' cores.

    The policy's ranks are packed in their order, one per core; each other worker goes to the next node.
    """
    by_core = [node for node, count in enumerate(cores) for _ in range(count)]
    found: dict[tuple[Role, int], int] = {}
    node = 0
    for role, number in worker_numbers(config):
        node = by_core[number % len(by_core)] if role == "policy" else (node + 1) % len(cores)
        found[role, number] = node
    return found


def _fit(counts: Mapping[Role, int], each: int, gpus: Sequence[int]) -> bool:
    """Return whether workers with GPUs of their own fit, of which engines have `each` on one node."""
    wanted = sum(count * (each if role == "rollout" else 1) for role, count in counts.items())
    return wanted <= sum(gpus) and _num_engines(each, gpus) >= counts["rollout"]


def _count_keys(config: RunConfig) -> dict[Role, str]:
    """Return the setting of each role's number of workers; of reward workers, if all have the same model."""
    keys: dict[Role, str] = {
        "policy": "runtime.num_policy_ranks",
        "reference": "runtime.num_reference_ranks",
        "rollout": "rollout.num_workers",
    }
    reward = config.reward
    if isinstance(reward, ModelReward):
        keys["reward"] = "reward.num_workers"
    elif isinstance(reward, WeightedReward) and len(reward_models(reward)) == 1:
        (name,) = (name for name, part in reward.parts.items() if isinstance(part.reward, ModelReward))
        keys["reward"] = f"reward.parts.{name}.reward.num_workers"
    return keys


def _num_engines(each: int, gpus: Sequence[int]) -> int:
    return sum(count // each for count in gpus)


def _first(settings: Iterable[str]) -> list[str]:
    return list(islice(settings, 1))
