"""Translate sampling settings to vLLM's, and its outputs to ours."""

from typing import Any

import numpy as np

from infra.engines.base import Generation, Sampling
from schemas.errors import NonFiniteError


def vllm_params(sampling: Sampling, seed: int, max_tokens: int) -> Any:
    """Return vLLM's parameters for one sample of at most `max_tokens`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0 if sampling.temperature > 0 else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the model's own is one of the stop tokens
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> Any:
    """Return vLLM's parameters of a request for the log-probs of its prompt; it also samples one token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def prompt_logprobs(output: Any) -> np.ndarray:
    """Return the log-probs of a finished request's prompt: float32 [T - 1], of all tokens but the first."""
    tokens, entries = output.prompt_token_ids, output.prompt_logprobs
    return np.array([entries[at][tokens[at]].logprob for at in range(1, len(tokens))], dtype=np.float32)


def generation(output: Any) -> Generation:
    """Translate a finished `CompletionOutput`."""
    logprobs = np.array(output.logprobs.logprobs, dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise NonFiniteError("the model's logits are not finite; its weights have diverged")
    assert output.finish_reason in ("stop", "length"), output.finish_reason
    return Generation(np.array(output.token_ids, dtype=np.int32), logprobs, output.finish_reason)
