"""The rollout engine that a config names."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from infra.engines.base import RolloutEngine
from infra.engines.transformers import TransformersEngine
from infra.engines.vllm.sizes import max_model_len
from infra.engines.vllm.start import open_vllm
from infra.models.load import load_model
from infra.ray.device import choose_device
from schemas.config.rollout import TransformersRollout, VllmRollout
from schemas.config.run import RunConfig


def open_engine(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """Start the engine of `rollout.kind` in this process, with the model folder's weights as policy version 0.

    Args:
        config: The run.
        tokenizer: The model's, which stop texts are looked for with.

    Raises:
        UserError: The model is not usable, or its engine can't run here.
    """
    return _OPEN[config.rollout.kind](config, config.rollout, tokenizer)


def _open_transformers(
    config: RunConfig, rollout: TransformersRollout, tokenizer: PreTrainedTokenizerBase
) -> RolloutEngine:
    model = load_model(config.model)
    model.to(choose_device())  # type: ignore[arg-type]  # its decorator hides that a device will do
    return TransformersEngine(model, max_cache_bytes=rollout.max_cache_bytes, tokenizer=tokenizer)


def _open_vllm(config: RunConfig, rollout: VllmRollout, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    return open_vllm(config.model, rollout, max_model_len(config))


_OPEN: dict[str, Callable[[RunConfig, Any, PreTrainedTokenizerBase], RolloutEngine]] = {
    "transformers": _open_transformers,
    "vllm": _open_vllm,
}
