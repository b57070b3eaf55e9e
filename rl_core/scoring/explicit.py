"""Causal attention with a softcap or with sinks, which no fused kernel computes on every device.

H query heads, K key and value heads, L tokens of one sequence, D head size, N sequences of equal length.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

QUERY_TOKENS = 512  # whose scores exist at once, in the forward and in the backward


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend causally, scores in float32 for `QUERY_TOKENS` queries at a time: [N, H, L, D] in the dtype of `value`.

    Args:
        query: [N, H, L, D], of the last L of M tokens.
        key: [N, K, M, D]; H is a multiple of K.
        value: [N, K, M, D].
        scaling: Factor of the scores; None: D ** -0.5.
        sliding_window: A token attends to itself and the window - 1 tokens before it; None: to all tokens before it.
        softcap: Scores become softcap * tanh(score / softcap) (Gemma 2, arXiv:2408.00118); None: they stay.
        sinks: [H] a further score of each head, whose share of the softmax is dropped (gpt-oss, arXiv:2508.10925).
    """
    num_repeats, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (states.repeat_interleave(num_repeats, dim=1) for states in (key, value))
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    before = key.shape[2] - length
    blocks = []
    for start in range(before, before + length, QUERY_TOKENS):
        stop = min(start + QUERY_TOKENS, before + length)
        first = 0 if sliding_window is None else max(0, start - sliding_window + 1)
        parts = query[:, :, start - before : stop - before], key[:, :, first:stop], value[:, :, first:stop]
        visible = visible_keys(start, stop, first, sliding_window, query.device)
        options = visible, softcap, sinks
        # A single block is kept for the backward; of several, each is computed again there.
        blocks.append(
            _attend(*parts, *options)
            if length <= QUERY_TOKENS
            else checkpoint(_attend, *parts, *options, use_reentrant=False)
        )
    return torch.cat(blocks, dim=2)


def visible_keys(start: int, stop: int, first: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """Return which keys [first, stop) the queries [start, stop) of a sequence attend to: bool, [queries, keys]."""
    distance = torch.arange(start, stop, device=device)[:, None] - torch.arange(first, stop, device=device)
    return (distance >= 0) if sliding_window is None else (distance >= 0) & (distance < sliding_window)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    scores = (query @ key.transpose(-1, -2)).float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value
