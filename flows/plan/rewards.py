"""The device memory of the reward workers of a planned run."""

from dataclasses import dataclass

import torch

from infra.engines.embedded.cache import cache_bytes_per_token
from rl_core.planning.activations import trace_activations
from rl_core.planning.memory import FORWARD_BUFFERS
from rl_core.rewards.judge_model import build_meta_judge
from rl_core.rewards.model import build_meta_reward_model
from schemas.config.judge import JudgeModelReward
from schemas.config.reward import ModelReward
from schemas.config.reward_base import HostedReward
from schemas.config.rollout import VllmRollout
from schemas.config.run import RunConfig
from schemas.errors import ModelError
from schemas.placement import Device


@dataclass(frozen=True)
class RewardBytes:
    """The bytes of a reward worker.

    Attributes:
        weights: Of the model, in the compute dtype.
        forward: Beyond the weights, of a packed row at the token budget; of a judge, the KV cache.
        warnings: What could not be counted.
        gpu_fraction: The part of a GPU's memory that an engine reserves for both; 0: none.
    """

    weights: int
    forward: int
    warnings: tuple[str, ...] = ()
    gpu_fraction: float = 0.0

    @classmethod
    def of(cls, config: RunConfig, *, on_gpus: bool) -> "RewardBytes | None":
        """Return those of the reward model or judge that takes most; None without one.

        Raises:
            ModelError: A folder holds no such model.
        """
        samples = config.rollout.samples_per_prompt
        device: Device = "cuda" if on_gpus else "cpu"
        measured = [_measure(model, device, samples) for model in config.reward.models]
        return max(measured, key=lambda each: (each.gpu_fraction, each.weights + each.forward), default=None)


def _measure(config: HostedReward, device: Device, samples: int) -> RewardBytes:
    if isinstance(config, JudgeModelReward):
        return _measure_judge(config, device, samples)
    assert isinstance(config, ModelReward), f"{type(config).__name__} has no model"
    model = build_meta_reward_model(config).to(getattr(torch, config.dtype_on(device)))
    weights = sum(weight.nbytes for weight in model.parameters())
    try:
        traced = trace_activations(model, config.token_budget, longest=config.max_tokens)
    except ModelError as error:
        return RewardBytes(weights, 0, (f"activations of the reward model are not counted: {error}",))
    return RewardBytes(weights, FORWARD_BUFFERS * (traced.widest + traced.layer_input))


def _measure_judge(config: JudgeModelReward, device: Device, samples: int) -> RewardBytes:
    """Return the bytes of a judge's worker; of its forward, the KV cache, which is nearly all."""
    engine = config.engine_config
    model = build_meta_judge(config).to(getattr(torch, engine.dtype_on(device)))
    weights = sum(weight.nbytes for weight in model.parameters())
    if isinstance(engine, VllmRollout):
        fraction = engine.gpu_fraction(is_colocated=False) if device == "cuda" else 0.0
        return RewardBytes(weights, config.cache_bytes, gpu_fraction=fraction)
    longest = samples * (config.max_question_tokens + config.max_tokens)
    return RewardBytes(weights, min(config.cache_bytes, longest * cache_bytes_per_token(model.config, model.dtype)))
