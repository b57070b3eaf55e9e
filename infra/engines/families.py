"""Whether a run's model is of a family that can be scored and sampled from, before anything is started.

A tiny model of the family is put to the embedded engine, and compared with its own forward.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from infra.engines.base import GenerationRequest, Sampling, generate_all
from infra.engines.embedded.engine import TransformersEngine
from infra.engines.sizes import max_model_len
from rl_core.model_folder import load_config
from rl_core.scoring import Structure, check_structure
from rl_core.scoring.comparison import one_line_errors, score_alone
from rl_core.scoring.miniature import LIMIT_TOKENS, build_miniature, single_thread
from rl_core.scoring.per_sequence import position_limit
from rl_core.scoring.structure import MAX_DIFFERENCE, relative_difference
from schemas.config.model import ModelConfig
from schemas.config.rollout import TransformersRollout
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, ModelError, PipelineError, ScoringError

_PROMPTS = (3, LIMIT_TOKENS + 5, 8)  # tokens: of unequal lengths, so that rows are padded; one is beyond every limit
_SAMPLES = 2
_RESPONSE_TOKENS = LIMIT_TOKENS + 2


@single_thread()
@torch.no_grad()
def engine_fault(config: PretrainedConfig, longest: int) -> str | None:
    """Sample from a tiny model of a config's family, and compare log-probs with its own eager forward.

    Args:
        config: The model's.
        longest: Tokens of the longest row: only limits below it count.

    Returns:
        Why the embedded engine can't run the family; None if it can, or if no tiny model of the family runs.
    """
    try:
        model = build_miniature(config, longest)
        default: str = model.config._attn_implementation
        score_alone(model, [(torch.tensor([1]), torch.tensor([2, 3]))])
    except ScoringError:
        return None
    try:
        sampled, logprobs = _sample(model, default)
        own = torch.cat(score_alone(model, sampled))
    except PipelineError as error:
        return str(error)
    if relative_difference(torch.cat(logprobs), own) <= MAX_DIFFERENCE:
        return None
    return "log-probs of a tiny model of this family differ from those of its own forward"


def _sample(
    model: PreTrainedModel, attention: str
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """Return the prompts and responses of all rows, and the log-probs of these."""
    vocab_size, generator = model.config.get_text_config().vocab_size, np.random.default_rng(0)
    requests = [
        GenerationRequest(generator.integers(vocab_size, size=length), tuple(range(at, at + _SAMPLES)))
        for at, length in enumerate(_PROMPTS)
    ]
    with one_line_errors(model, "the embedded engine"):
        model.set_attn_implementation(attention)
        engine = TransformersEngine(model)
        generations = generate_all(engine, requests, Sampling(max_response_tokens=_RESPONSE_TOKENS))
    prompts = [torch.from_numpy(request.prompt_ids) for request in requests for _ in range(_SAMPLES)]
    responses = [torch.from_numpy(each.token_ids.astype(np.int64)) for each in generations]
    return list(zip(prompts, responses, strict=True)), [torch.from_numpy(each.logprobs) for each in generations]


def check_family(config: RunConfig) -> None:
    """Check that scoring and the engine compute what the model's own forward computes, on a tiny model of its family.

    Raises:
        ConfigError: Rows may be longer than the positions that the model's rotary embeddings are first made for, or
            samples are to share prompts and can't.
        ModelError: Scoring or the engine computes something else.
    """
    family = _family_of(config)
    model, longest = family.config, family.longest
    limit = position_limit(model)
    if limit is not None and longest > limit and config.sft is None:  # scoring has the positions of each row's length
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_response_tokens allow rows of {longest} tokens, but a "
            f"{model.model_type} model has other positions in rows of more than {limit} (LongRoPE), and no engine "
            f"changes them while it samples; limit both to {limit} tokens together"
        )
    check_scoring(config, config.model, longest)
    samples_here = config.sft is None and isinstance(config.rollout, TransformersRollout)
    if samples_here and (fault := _engine_fault(family)):
        raise ModelError(
            f"model.path {config.model.path}: a {model.model_type} model can't be sampled from by the embedded engine: "
            f'{fault}; set rollout.kind = "vllm", or use a model of another family'
        )
    with_sharing(config)


def check_scoring(config: RunConfig, model: ModelConfig, longest: int) -> None:
    """Check that scoring computes what a model's own forward computes, on a tiny model of its family.

    Args:
        config: The run.
        model: Its model, or a teacher.
        longest: Tokens of the longest row: only limits below it count.

    Raises:
        ModelError: Scoring computes something else.
    """
    family, kind = _read_family(model, longest), config.packing.kind
    structure = _structure(family)
    if structure is not None and (fault := getattr(structure, kind)) is not None:
        other = structure.padded is None and kind == "packed"
        advice = 'set packing.kind = "padded", which computes the same' if other else "use a model of another family"
        raise ModelError(
            f"model.path {model.path}: a {family.config.model_type} model can't be scored in {kind} rows: {fault}; "
            f"{advice}"
        )


def with_sharing(config: RunConfig) -> tuple[RunConfig, str]:
    """Return the config with `packing.share_prompts` decided, and a line that says what it is and why.

    Raises:
        ConfigError: It is true, but samples can't share prompts.
        ModelError: The model's config can't be read.
    """
    wanted = config.packing.share_prompts
    fault = "packing.share_prompts is false" if wanted is False else _sharing_fault(config)
    if wanted and fault is not None:
        raise ConfigError(f"packing.share_prompts = true, but samples can't share a prompt: {fault}; leave it out")
    line = f"each sample's prompt is computed for itself: {fault}"
    if fault is None:
        what = "a prompt is computed once for its samples"
        if config.sft is not None:
            what = "what rows begin with in common is computed once"
        line = f"{what} in a micro-batch (packing.share_prompts)"
    decides_on_chats = any(environment.kind != "tools" for environment in config.environments)
    if decides_on_chats and (of_branches := branch_fault(config)) is not None:
        line += f"; a trajectory that branches fails, as {of_branches}"
    return config.replace(packing=config.packing.replace(share_prompts=fault is None)), line


def branch_fault(config: RunConfig) -> str | None:
    """Return why the rows of a run can't branch; None: they can."""
    faults = {
        'packing.kind is "padded"': config.packing.kind == "padded",
        "teachers read each row as one path": config.distillation is not None,
    }
    return next((fault for fault, is_so in faults.items() if is_so), None) or _structural_fault(_family_of(config))


def _sharing_fault(config: RunConfig) -> str | None:
    """Return why samples can't share prompts; None: they can."""
    return 'packing.kind is "padded"' if config.packing.kind == "padded" else _structural_fault(_family_of(config))


def shares_prompts(config: RunConfig, model: ModelConfig, longest: int) -> bool:
    """Return whether samples share the prompts that a teacher reads.

    Args:
        config: The run, of which `with_sharing` has decided whether samples share the policy's prompts.
        model: The teacher.
        longest: See `check_scoring`.
    """
    return bool(config.packing.share_prompts) and _structural_fault(_read_family(model, longest)) is None


def _structural_fault(family: "_Family") -> str | None:
    """Return why packed sequences of a family's models can't have tokens in common; None: they can."""
    structure = _structure(family)
    if structure is None:
        return f"no tiny model of {family.config.model_type} runs that would show whether its sequences can share one"
    return None if structure.shared is None else f"a {family.config.model_type} model: {structure.shared}"


def _family_of(config: RunConfig) -> "_Family":
    return _read_family(config.model, max_model_len(config))


def _read_family(model: ModelConfig, longest: int) -> "_Family":
    found = load_config(model.path)
    return _Family(found.to_json_string(use_diff=False), longest, found)


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
