"""Whether the embedded engine computes a family's function: a tiny model of it against its own forward."""

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from infra.engines.base import GenerationRequest, Sampling, generate_all
from infra.engines.embedded.engine import TransformersEngine
from rl_core.scoring.comparison import one_line_errors, score_alone
from rl_core.scoring.miniature import LIMIT_TOKENS, build_miniature, single_thread
from rl_core.scoring.structure import MAX_DIFFERENCE, relative_difference
from schemas.errors import PipelineError, ScoringError

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
