"""Layers with a recurrent state (gated delta nets): in a packed row, each sequence starts with an empty state."""

from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from schemas.errors import ScoringError

# What decoder layers call their recurrent token mixer (qwen3_next, qwen3_5 and its mixture of experts).
_MIXERS = ("linear_attn",)
_LAYER_TYPE = "linear_attention"  # of these, in configs


def equal_runs(*boundaries: Tensor) -> list[tuple[tuple[int, ...], int]]:
    """Return the lengths in tokens and the number of sequences of each run, from [S + 1] boundaries of each tensor.

    Example:
        >>> equal_runs(torch.tensor([0, 3, 6, 8]), torch.tensor([0, 5, 10, 12]))
        [((3, 5), 2), ((2, 2), 1)]
    """
    lengths = (tuple(b - a for a, b in pairwise(cu_seqlens.tolist())) for cu_seqlens in boundaries)
    return [(length, len(list(run))) for length, run in groupby(zip(*lengths, strict=True))]


def map_runs(function: Callable[..., Tensor], *packed: tuple[Tensor, Tensor]) -> Tensor:
    """Call a function of independent sequences once per run, and concatenate its results.

    Args:
        function: Takes a batch [N, L, ...] of each packed tensor, N sequences of its own L tokens, and returns that of
            the first one's shape.
        *packed: [T, ...] and its [S + 1] boundaries, from 0 to T, each.

    Returns:
        [T, ...], with T and L of the first packed tensor.
    """
    tensors, boundaries = zip(*packed, strict=True)
    runs = equal_runs(*boundaries)
    # `split` instead of slices, because the gradient of each slice would be as long as the row.
    parts = (torch.split(states, [lengths[at] * count for lengths, count in runs]) for at, states in enumerate(tensors))
    outputs = []
    for (lengths, count), *states in zip(runs, *parts, strict=True):
        batches = (part.view(count, length, *part.shape[1:]) for part, length in zip(states, lengths, strict=True))
        outputs.append(function(*batches).flatten(0, 1))
    return torch.cat(outputs)


def has_recurrent_layers(config: PretrainedConfig) -> bool:
    """Return whether a model that can be packed has layers with a recurrent state."""
    return _LAYER_TYPE in (getattr(config.get_text_config(decoder=True), "layer_types", None) or ())


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
        shared_keys: object = None,
        **options: Any,
    ) -> Tensor:
        if cu_seqlens is None:
            return self._forward(hidden_states, *arguments, **options)
        if shared_keys is not None:
            raise ScoringError("its recurrent layers have no state at the end of a prompt that several responses share")
        mixed = map_runs(lambda part: self._forward(part, *arguments, **options), (hidden_states[0], cu_seqlens))
        return mixed.unsqueeze(0)
