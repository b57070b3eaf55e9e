"""Whether a run's model is of a family that can be scored and sampled from, before anything is started."""

from dataclasses import dataclass, field
from functools import lru_cache

from transformers import PretrainedConfig

from infra.engines.embedded.structure import engine_fault
from infra.engines.vllm.sizes import max_model_len
from rl_core.model_folder import load_config
from rl_core.scoring import Structure, check_structure
from rl_core.scoring.positions import position_limit
from schemas.config.rollout import TransformersRollout
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, ModelError


def check_family(config: RunConfig) -> None:
    """Check that scoring and the engine compute what the model's own forward computes, on a tiny model of its family.

    Raises:
        ConfigError: Rows may be longer than the positions that the model's rotary embeddings are first made for.
        ModelError: Scoring or the engine computes something else.
    """
    model, longest = load_config(config.model.path), max_model_len(config)
    limit = position_limit(model)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_response_tokens allow rows of {longest} tokens, but a "
            f"{model.model_type} model has other positions in rows of more than {limit} (LongRoPE), and no engine "
            f"changes them while it samples; limit both to {limit} tokens together"
        )
    of_family = f"model.path {config.model.path}: a {model.model_type} model"
    family, kind = _Family(model.to_json_string(use_diff=False), longest, model), config.packing.kind
    structure = _structure(family)
    if structure is not None and (fault := getattr(structure, kind)) is not None:
        other = structure.padded is None and kind == "packed"
        advice = 'set packing.kind = "padded", which computes the same' if other else "use a model of another family"
        raise ModelError(f"{of_family} can't be scored in {kind} rows: {fault}; {advice}")
    if isinstance(config.rollout, TransformersRollout) and (fault := _engine_fault(family)):
        raise ModelError(
            f"{of_family} can't be sampled from by the embedded engine: {fault}; "
            'set rollout.kind = "vllm", or use a model of another family'
        )


@dataclass(frozen=True)
class _Family:
    """A config that is checked once in a process, as commands check theirs several times."""

    described: str
    longest: int
    config: PretrainedConfig = field(compare=False)


@lru_cache(maxsize=4)
def _structure(family: _Family) -> Structure | None:
    return check_structure(family.config, family.longest)


@lru_cache(maxsize=4)
def _engine_fault(family: _Family) -> str | None:
    return engine_fault(family.config, family.longest)
