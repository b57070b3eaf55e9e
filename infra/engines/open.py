"""Start the rollout engine of a config."""

from collections.abc import Callable
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from infra.engines.base import RolloutEngine
from infra.engines.transformers import TransformersEngine
from infra.engines.vllm.sizes import max_model_len
from infra.engines.vllm.start import open_vllm
from infra.models.load import load_model
from infra.ray.device import choose_device
from schemas.config.rollout import EngineRollout, TransformersRollout, VllmRollout
from schemas.config.run import RunConfig

Rollout = TypeVar("Rollout", bound=EngineRollout)


def open_engine(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """Start the engine of `rollout.kind` in this process, with the model folder's weights as policy version 0.

    Args:
        config: The run's configuration.
        tokenizer: The model's tokenizer, used to find stop strings.

    Raises:
        UserError: The model is not usable, or the engine can't run here.
    """
    return _OPENERS[type(config.rollout)](config, config.rollout, tokenizer)


def _open_transformers(
    config: RunConfig, rollout: TransformersRollout, tokenizer: PreTrainedTokenizerBase
) -> RolloutEngine:
    model = load_model(config.model)
    model.to(choose_device())  # type: ignore[arg-type]  # its decorator hides that a device is accepted
    return TransformersEngine(model, max_cache_bytes=rollout.max_cache_bytes, tokenizer=tokenizer)


def _open_vllm(config: RunConfig, rollout: VllmRollout, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    return open_vllm(config.model, rollout, max_model_len(config))


def _opener(
    config_class: type[Rollout], function: Callable[[RunConfig, Rollout, PreTrainedTokenizerBase], RolloutEngine]
) -> dict[type[EngineRollout], Callable[[RunConfig, Any, PreTrainedTokenizerBase], RolloutEngine]]:
    """Return one entry of `_OPENERS`; the type checker rejects a function that takes another config class."""
    return {config_class: function}


_OPENERS: dict[type[EngineRollout], Callable[[RunConfig, Any, PreTrainedTokenizerBase], RolloutEngine]] = {
    **_opener(TransformersRollout, _open_transformers),
    **_opener(VllmRollout, _open_vllm),
}
