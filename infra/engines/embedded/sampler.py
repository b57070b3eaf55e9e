"""Sample tokens from logits. N rows, V tokens of vocabulary."""

import torch

from infra.engines.base import Sampling
from schemas.errors import NonFiniteError


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row by inverting its cumulative distribution at the row's uniform.

    Truncation follows vLLM's order: temperature, min-p (Nguyen et al. 2024, arXiv:2407.01082), top-k, top-p; top-p is
    relative to the probability that the others leave.

    Args:
        logits: Floating point [N, V].
        uniforms: float64 [N] in [0, 1); unused when greedy.
        sampling: Temperature (0: the most likely token), min-p, top-k and top-p.

    Returns:
        Token ids int64 [N], and their log-probs float32 [N] in nats: log-softmax(logits / temperature) before
        min-p, top-k and top-p; greedy log-probs are those of temperature 1.

    Raises:
        NonFiniteError: A row's logits contain NaN or +inf.
    """
    logits = logits.float()
    if sampling.temperature > 0 and sampling.temperature != 1:
        logits = logits / sampling.temperature
    highest, most_likely = logits.max(dim=-1, keepdim=True)
    if not bool(highest.isfinite().all()):
        raise NonFiniteError("the model's logits are not finite; its weights have diverged")
    ratios = (logits - highest).exp_()  # to the most likely token's probability
    # Sums are in double precision, so that tokens in the far tail keep their part of the unit interval.
    if sampling.temperature == 0:
        tokens, totals = most_likely, ratios.sum(dim=-1, keepdim=True, dtype=torch.float64)
    elif sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1:
        totals = ratios.sum(dim=-1, keepdim=True, dtype=torch.float64)
        tokens = _invert_truncated(ratios, uniforms, sampling)
    else:
        cumulative = ratios.cumsum(dim=-1, dtype=torch.float64)
        totals = cumulative[:, -1:]
        tokens = _invert(cumulative, uniforms)
    logprobs = (logits.gather(-1, tokens) - highest).double() - totals.log()
    return tokens[:, 0], logprobs[:, 0].float()


def _invert(cumulative: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return [N, 1], the first index at which `cumulative` [N, V] exceeds the uniform times its last value."""
    return torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)


def _invert_truncated(ratios: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return [N, 1], tokens sampled from those that min-p, top-k and top-p keep; the most likely one's ratio is 1."""
    if sampling.min_p > 0:
        ratios = ratios * (ratios >= sampling.min_p)
    if sampling.top_k == 0 and sampling.top_p == 1:
        return _invert(ratios.cumsum(dim=-1, dtype=torch.float64), uniforms)
    num_kept = min(sampling.top_k or ratios.shape[-1], ratios.shape[-1])
    ratios, order = ratios.topk(num_kept, dim=-1)
    cumulative = ratios.cumsum(dim=-1, dtype=torch.float64)
    if sampling.top_p < 1:
        kept = cumulative - ratios < sampling.top_p * cumulative[:, -1:]  # always keeps the first, the most likely
        cumulative = (ratios * kept).cumsum(dim=-1, dtype=torch.float64)
    return order.gather(-1, _invert(cumulative, uniforms))
