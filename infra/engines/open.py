"""Start the engine of a config."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from infra.engines.base import RolloutEngine
from infra.engines.embedded.engine import TransformersEngine
from infra.engines.sizes import max_model_len
from infra.engines.vllm.start import open_process
from infra.models.load import load_model
from infra.models.lora import add_adapter
from infra.ray.device import choose_device
from rl_core.registry import Registry, entry
from schemas.config.model import ModelConfig
from schemas.config.rollout import ProgramRollout, RolloutConfig, TransformersRollout, VllmRollout
from schemas.config.run import RunConfig


@dataclass(frozen=True)
class EngineModel:
    """The model that an engine runs.

    Attributes:
        config: The model.
        tokenizer: Its tokenizer, used to find stop strings.
        max_tokens: The most tokens of a prompt plus its response.
        is_colocated: Whether the engine shares its GPU.
        sleeps: Whether it gives up its memory while others need it.
        shared_memory: `runtime.shared_memory`, through which vLLM gets adapters.
        answer_seconds: How long an engine's process may take to answer.
    """

    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    is_colocated: bool = False
    sleeps: bool = False
    shared_memory: str | None = None
    answer_seconds: float = 600.0


def open_engine(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """Start the engine of `rollout.kind`, with the model folder's weights as policy version 0.

    Args:
        config: The run's configuration.
        tokenizer: The model's tokenizer, used to find stop strings.

    Raises:
        UserError: The model is not usable, or the engine can't run here.
    """
    model = EngineModel(
        config.model,
        tokenizer,
        max_model_len(config),
        is_colocated=config.runtime.placement == "colocated",
        sleeps=config.time_shares_gpus,
        shared_memory=config.runtime.shared_memory,
        answer_seconds=config.timeouts.engine_seconds,
    )
    return OPENERS(config.rollout, model)


def _open_transformers(rollout: TransformersRollout, of: EngineModel) -> RolloutEngine:
    model = load_model(of.config)
    if of.config.lora is not None and of.config.publishes_adapters:
        add_adapter(model, of.config.lora)
        model.requires_grad_(False)
    model.to(choose_device())  # type: ignore[arg-type]  # its decorator hides that a device is accepted
    return TransformersEngine(
        model,
        max_cache_bytes=rollout.max_cache_bytes,
        tokenizer=of.tokenizer,
        records_experts=rollout.router_replay,
        keeps_weights=of.config.publishes_adapters,
    )


def _open_process(rollout: VllmRollout | ProgramRollout, of: EngineModel) -> RolloutEngine:
    return open_process(
        of.config,
        rollout,
        of.max_tokens,
        is_colocated=of.is_colocated,
        sleeps=of.sleeps,
        shared_memory=of.shared_memory,
        answer_seconds=of.answer_seconds,
    )


OPENERS = Registry(
    "infra.engines.open.OPENERS",
    RolloutConfig,
    entry(TransformersRollout, _open_transformers),
    entry(VllmRollout, _open_process),
    entry(ProgramRollout, _open_process),
)
"""Starters of engines: (settings, model) -> engine."""
