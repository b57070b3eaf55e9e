"""Start the rollout engine of a config."""

from transformers import PreTrainedTokenizerBase

from infra.engines.base import RolloutEngine
from infra.engines.embedded.engine import TransformersEngine
from infra.engines.vllm.sizes import max_model_len
from infra.engines.vllm.start import open_vllm
from infra.models.load import load_model
from infra.models.lora import add_adapter
from infra.ray.device import choose_device
from rl_core.registry import Registry, entry
from schemas.config.rollout import RolloutConfig, TransformersRollout, VllmRollout
from schemas.config.run import RunConfig


def open_engine(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """Start the engine of `rollout.kind` in this process, with the model folder's weights as policy version 0.

    Args:
        config: The run's configuration.
        tokenizer: The model's tokenizer, used to find stop strings.

    Raises:
        UserError: The model is not usable, or the engine can't run here.
    """
    return OPENERS(config.rollout, config, tokenizer)


def _open_transformers(
    rollout: TransformersRollout, config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> RolloutEngine:
    model = load_model(config.model)
    if (lora := config.model.lora) is not None and config.model.publishes_adapters:
        add_adapter(model, lora, config.seed)
        model.requires_grad_(False)
    model.to(choose_device())  # type: ignore[arg-type]  # its decorator hides that a device is accepted
    return TransformersEngine(
        model,
        max_cache_bytes=rollout.max_cache_bytes,
        tokenizer=tokenizer,
        records_experts=rollout.router_replay,
    )


def _open_vllm(rollout: VllmRollout, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    is_colocated = config.runtime.placement == "colocated"
    return open_vllm(
        config.model,
        rollout,
        max_model_len(config),
        is_colocated=is_colocated,
        sleeps=config.takes_turns,
        shared_memory=config.runtime.shared_memory,
    )


OPENERS = Registry(
    "infra.engines.open.OPENERS",
    RolloutConfig,
    entry(TransformersRollout, _open_transformers),
    entry(VllmRollout, _open_vllm),
)
