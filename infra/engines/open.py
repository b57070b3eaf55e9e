"""Start the engine of a config, or find out which one it has."""

from transformers import PreTrainedTokenizerBase

from infra.engines.base import EngineModel, RolloutEngine
from infra.engines.embedded.engine import TransformersEngine
from infra.engines.program.process import EngineInstallation
from infra.engines.program.start import find_program, open_program
from infra.engines.sizes import max_model_len
from infra.engines.vllm.installation import find_vllm
from infra.engines.vllm.start import open_vllm
from infra.models.load import load_model
from infra.models.lora import add_adapter
from infra.ray.device import choose_device
from rl_core.registry import Registry, entry
from schemas.config.rollout import ProgramRollout, RolloutConfig, TransformersRollout, VllmRollout
from schemas.config.run import RunConfig


def open_engine(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """Start the engine of `rollout.kind`, with the model folder's weights as policy version 0.

    Raises:
        UserError: The model is not usable, or the engine can't run here.
    """
    model = EngineModel(
        config.model,
        max_model_len(config),
        tokenizer,
        is_colocated=config.runtime.placement == "colocated",
        sleeps=config.time_shares_gpus,
        shared_memory=config.runtime.shared_memory,
        answer_seconds=config.timeouts.engine_seconds,
    )
    return OPENERS(config.rollout, model)


def find_engine(rollout: VllmRollout | ProgramRollout) -> EngineInstallation:
    """Return the engine of a run that is a program.

    Raises:
        ConfigError: See `find_vllm` and `find_program`.
    """
    if isinstance(rollout, VllmRollout):
        return find_vllm(rollout.python)
    return find_program(rollout.program, rollout.python)


def engine_versions(rollout: RolloutConfig) -> dict[str, str]:
    """Return the version of a run's engine by its package, if that is not among this environment's."""
    if isinstance(rollout, TransformersRollout) or (isinstance(rollout, VllmRollout) and rollout.python is None):
        return {}
    found = find_engine(rollout)
    return {found.engine: found.version}


def _open_transformers(rollout: TransformersRollout, of: EngineModel) -> TransformersEngine:
    model = load_model(of.config)
    if (lora := of.config.published_lora) is not None:
        add_adapter(model, lora)
        model.requires_grad_(False)
    model.to(choose_device())  # type: ignore[arg-type]  # its decorator hides that a device is accepted
    return TransformersEngine(
        model,
        max_cache_bytes=rollout.max_cache_bytes,
        tokenizer=of.tokenizer,
        records_experts=rollout.router_replay,
        keeps_weights=of.config.publishes_adapters,
    )


OPENERS: Registry[[EngineModel], RolloutEngine] = Registry(
    "infra.engines.open.OPENERS",
    RolloutConfig,
    entry(TransformersRollout, _open_transformers),
    entry(VllmRollout, open_vllm),
    entry(ProgramRollout, open_program),
)
"""Starters of engines: (settings, model) -> engine."""
