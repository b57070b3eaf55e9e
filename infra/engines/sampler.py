"""From logits to tokens: N rows, V tokens of vocabulary."""

import torch

from infra.engines.base import Sampling
from schemas.errors import NonFiniteError


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting its cumulative distribution at the row's uniform.

    Tokens are left out in vLLM's order: temperature, min-p (Nguyen et al. 2024, arXiv:2407.01082), top-k, top-p;
    top-p counts in what the others leave.

    Args:
        logits: Floating point [N, V].
        uniforms: float64 [N] in [0, 1); not used when greedy.
        sampling: Temperature (0: the likeliest token), min-p, top-k and top-p.

    Returns:
        Token ids int64 [N], and their log-probs float32 [N] in nats: log-softmax(logits / temperature) before
        min-p, top-k and top-p; greedy's are those of temperature 1.

    Raises:
        NonFiniteError: A row's logits hold NaN or +inf.
    """
    logits = logits.float()
    if sampling.temperature > 0 and sampling.temperature != 1:
        logits = logits / sampling.temperature
    highest, likeliest = logits.max(dim=-1, keepdim=True)
    if not bool(highest.isfinite().all()):
        raise NonFiniteError("the model's logits are not finite; the weights it was given have diverged")
    shares = (logits - highest).exp_()  # of the likeliest token's probability
    # Sums are in double, so that tokens of the far tail keep their share of the unit interval.
    if sampling.temperature == 0:
        tokens, totals = likeliest, shares.sum(dim=-1, keepdim=True, dtype=torch.float64)
    elif sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1:
        totals = shares.sum(dim=-1, keepdim=True, dtype=torch.float64)
        tokens = _invert_truncated(shares, uniforms, sampling)
    else:
        cumulative = shares.cumsum(dim=-1, dtype=torch.float64)
        totals = cumulative[:, -1:]
        tokens = _invert(cumulative, uniforms)
    logprobs = (logits.gather(-1, tokens) - highest).double() - totals.log()
    return tokens[:, 0], logprobs[:, 0].float()


def _invert(cumulative: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return [N, 1], the first place of `cumulative` [N, V] that is above the uniform's share of all."""
    return torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)


def _invert_truncated(shares: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return [N, 1], tokens drawn of those that min-p, top-k and top-p keep; the likeliest one's share is 1."""
    if sampling.min_p > 0:
        shares = shares * (shares >= sampling.min_p)
    if sampling.top_k == 0 and sampling.top_p == 1:
        return _invert(shares.cumsum(dim=-1, dtype=torch.float64), uniforms)
    num_kept = min(sampling.top_k or shares.shape[-1], shares.shape[-1])
    shares, order = shares.topk(num_kept, dim=-1)
    cumulative = shares.cumsum(dim=-1, dtype=torch.float64)
    if sampling.top_p < 1:
        kept = cumulative - shares < sampling.top_p * cumulative[:, -1:]  # the likeliest one always: nothing is before
        cumulative = (shares * kept).cumsum(dim=-1, dtype=torch.float64)
    return order.gather(-1, _invert(cumulative, uniforms))
