"""From logits to tokens: N rows, V tokens of vocabulary."""

import torch

from infra.engines.base import Sampling
from schemas.errors import NonFiniteError


def draw(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting its cumulative distribution at the row's uniform.

    Args:
        logits: Floating point [N, V].
        uniforms: float64 [N] in [0, 1); not used when greedy.
        sampling: Temperature (0: the likeliest token), top-k and top-p; top-p counts in what top-k leaves.

    Returns:
        Token ids int64 [N], and their log-probs float32 [N] in nats: log-softmax(logits / temperature) before
        top-k and top-p; greedy's are those of temperature 1.

    Raises:
        NonFiniteError: A row's logits hold NaN or +inf.
    """
    logits = logits.float()
    if sampling.temperature > 0 and sampling.temperature != 1:
        logits = logits / sampling.temperature
    normalizer = logits.logsumexp(dim=-1)
    if not bool(normalizer.isfinite().all()):
        raise NonFiniteError("the model's logits are not finite; the weights it was given have diverged")
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        tokens = _invert(torch.exp(logits - normalizer[:, None]), uniforms, sampling)
    logprobs = logits.gather(-1, tokens[:, None])[:, 0] - normalizer
    return tokens, logprobs


def _invert(probs: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    order = None
    if sampling.top_k > 0 or sampling.top_p < 1:
        num_kept = min(sampling.top_k or probs.shape[-1], probs.shape[-1])
        probs, order = probs.topk(num_kept, dim=-1)
    # In double, so that tokens of the far tail keep their share of the unit interval.
    cumulative = probs.double().cumsum(dim=-1)
    if sampling.top_p < 1:
        before = cumulative - probs
        kept = before < sampling.top_p * cumulative[:, -1:]  # the likeliest token is always kept: before is 0
        cumulative = (probs * kept).double().cumsum(dim=-1)
    targets = uniforms * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, targets[:, None], right=True)  # the first that is above the target
    return (tokens if order is None else order.gather(-1, tokens))[:, 0]
