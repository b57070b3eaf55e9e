"""The roles of a run's workers, and how many there are of each."""

from itertools import accumulate, pairwise
from typing import Literal

from schemas.config.reward_base import HostedReward
from schemas.config.run import RunConfig

Role = Literal["policy", "reference", "rollout", "reward"]


def worker_name(identity: str, role: Role, number: int = 0) -> str:
    """Return the name under which every process of the cluster finds the worker of the run with that identity."""
    return f"{identity}/{role}-{number}"


def num_workers(config: RunConfig) -> dict[Role, int]:
    """Return how many workers of each role a run has."""
    return {
        "policy": config.runtime.num_policy_ranks,
        "reference": config.runtime.num_reference_ranks if config.needs_reference_worker else 0,
        "rollout": config.rollout.num_workers,
        "reward": sum(model.num_workers for model in config.reward.models),
    }


def gpus_per_worker(config: RunConfig, role: Role) -> int:
    """Return how many GPUs of one node a worker of a role takes: several for an engine with tensor parallelism."""
    return config.rollout.gpus_per_worker if role == "rollout" else 1


def worker_numbers(config: RunConfig) -> list[tuple[Role, int]]:
    """Return the role and number of each of a run's workers."""
    return [(role, number) for role, count in num_workers(config).items() for number in range(count)]


def reward_workers(config: RunConfig) -> list[range]:
    """Return the numbers of the reward workers of each of the config's reward models."""
    ends = list(accumulate(model.num_workers for model in config.reward.models))
    return [range(start, end) for start, end in pairwise([0, *ends])]


def reward_model_of(config: RunConfig, number: int) -> HostedReward:
    """Return the reward, and so the model, of a reward worker."""
    return next(
        model for model, numbers in zip(config.reward.models, reward_workers(config), strict=True) if number in numbers
    )
