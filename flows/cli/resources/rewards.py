"""The device memory of the reward workers of a planned run."""

from dataclasses import dataclass

import torch

from rl_core.planning.activations import trace_activations
from rl_core.planning.memory import FORWARD_BUFFERS
from rl_core.rewards.model import build_meta_reward_model
from schemas.config.reward import ModelReward
from schemas.config.run import RunConfig
from schemas.errors import ModelError


@dataclass(frozen=True)
class RewardBytes:
    """The bytes of a reward worker.

    Attributes:
        weights: Of the model, in the compute dtype.
        forward: Of a packed row at the token budget, beyond the weights.
        warnings: What could not be counted.
    """

    weights: int
    forward: int
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: RunConfig, *, on_gpus: bool) -> "RewardBytes | None":
        """Return those of the reward model with the most weights; None without one.

        Raises:
            ModelError: A folder holds no reward model.
        """
        measured = [_measure(model, "cuda" if on_gpus else "cpu") for model in config.reward.models]
        return max(measured, key=lambda each: each.weights + each.forward, default=None)


def _measure(config: ModelReward, device: str) -> RewardBytes:
    model = build_meta_reward_model(config).to(getattr(torch, config.dtype_on(device)))
    weights = sum(weight.nbytes for weight in model.parameters())
    try:
        traced = trace_activations(model, config.token_budget, longest=config.max_tokens)
    except ModelError as error:
        return RewardBytes(weights, 0, (f"activations of the reward model are not counted: {error}",))
    return RewardBytes(weights, FORWARD_BUFFERS * (traced.widest + traced.layer_input))
