"""Layers with a recurrent state (gated delta nets): in a packed row, each sequence starts with an empty state."""

from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# What decoder layers call their recurrent token mixer (qwen3_next, qwen3_5 and its mixture of experts).
_MIXERS = ("linear_attn",)


def equal_runs(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """Return the length in tokens and the number of sequences of each run, from [S + 1] boundaries.

    Example:
        >>> equal_runs(torch.tensor([0, 3, 6, 8]))
        [(3, 2), (2, 1)]
    """
    return [(length, len(list(run))) for length, run in groupby(b - a for a, b in pairwise(cu_seqlens.tolist()))]


def map_runs(function: Callable[..., Tensor], cu_seqlens: Tensor, *packed: Tensor) -> Tensor:
    """Call a function of independent sequences once per run, and concatenate its results.

    Args:
        function: Takes a batch [N, L, ...] of each packed tensor, N sequences of L tokens, and returns [N, L, ...].
        cu_seqlens: [S + 1] boundaries, from 0 to T.
        *packed: [T, ...] each.

    Returns:
        [T, ...].
    """
    runs = equal_runs(cu_seqlens)
    # `split` instead of slices, because the gradient of each slice would be as long as the row.
    tokens = [length * count for length, count in runs]
    parts = (torch.split(states, tokens) for states in packed)
    outputs = []
    for (length, count), *states in zip(runs, *parts, strict=True):
        batches = (part.view(count, length, *part.shape[1:]) for part in states)
        outputs.append(function(*batches).flatten(0, 1))
    return torch.cat(outputs)


def isolate_recurrent_layers(model: PreTrainedModel) -> None:
    """Let the recurrent layers of a model treat the sequences of a packed row one by one; without one, as before."""
    for module in model.modules():
        for name in _MIXERS:
            mixer = getattr(module, name, None)
            if isinstance(mixer, nn.Module) and not isinstance(mixer.forward, _PerSequence):
                mixer.forward = _PerSequence(mixer.forward)


class _PerSequence:
    """A recurrent layer's forward, run once per run of consecutive sequences of equal length.

    Args:
        forward: The layer's own: [N, L, hidden] to the same shape, with N independent sequences.
    """

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self._forward = forward

    def __call__(
        self,
        hidden_states: Tensor,
        *arguments: Any,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int = 0,
        **options: Any,
    ) -> Tensor:
        if cu_seqlens is None:
            return self._forward(hidden_states, *arguments, **options)
        mixed = map_runs(lambda part: self._forward(part, *arguments, **options), cu_seqlens, hidden_states[0])
        return mixed.unsqueeze(0)
