"""Parts of a model that are run for each sequence of a packed row as for it alone. N rows, T positions each.

Positions whose frequencies depend on a sequence's length (LongRoPE, arXiv:2402.13753): each has those of its own.
transformers chooses the frequencies of a whole forward by its longest sequence, so that a sequence's log-probs would
depend on what it is batched with.

Layers with a recurrent state (gated delta nets): in a packed row, each sequence starts with an empty state.
"""

from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from schemas.errors import ScoringError

_KIND = "longrope"
# What decoder layers call their recurrent token mixer (qwen3_next, qwen3_5 and its mixture of experts).
_MIXERS = ("linear_attn",)
_LAYER_TYPE = "linear_attention"  # of these, in configs


def position_limit(config: PretrainedConfig) -> int | None:
    """Return the tokens of a sequence above which all its positions have other frequencies; None: they never have."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    limits = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == _KIND]
    return min(limits, default=None)


def use_own_lengths(model: PreTrainedModel) -> None:
    """Let a model's rotary embeddings choose the frequencies of each sequence by its own length, if they choose any."""
    if (limit := position_limit(model.config)) is None:
        return
    for module in model.modules():
        if _KIND in str(getattr(module, "rope_type", "")) and not isinstance(module.forward, _ByOwnLength):
            module.forward = _ByOwnLength(module.forward, limit)


class _ByOwnLength:
    """A rotary embedding's forward, run for the short sequences and for the long ones.

    Args:
        forward: The module's own: of some states and positions [N, T], it returns cosines and sines [N, T, D].
        limit: The most tokens of a short sequence.
    """

    def __init__(self, forward: Callable[..., tuple[Tensor, ...]], limit: int) -> None:
        self._forward, self._limit = forward, limit

    def __call__(self, states: Tensor, position_ids: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        long = sequence_lengths(position_ids) > self._limit
        whole = self._forward(states, position_ids, *arguments, **options)
        if not long.any() or long.all():
            return whole
        short = self._forward(states, position_ids.masked_fill(long, 0), *arguments, **options)
        return tuple(torch.where(long[..., None], *pair) for pair in zip(whole, short, strict=True))


def sequence_lengths(position_ids: Tensor) -> Tensor:
    """Return the length of each token's sequence, int64 [N, T], from positions that start at 0 in each of a row.

    Example:
        >>> sequence_lengths(torch.tensor([[0, 1, 0, 1, 2]])).tolist()
        [[2, 2, 3, 3, 3]]
    """
    sequence = (position_ids == 0).cumsum(-1)
    lengths = position_ids.new_zeros(position_ids.shape[0], position_ids.shape[1] + 1)
    return lengths.scatter_reduce(-1, sequence, position_ids + 1, "amax").gather(-1, sequence)


def equal_runs(*boundaries: Tensor) -> list[tuple[tuple[int, ...], int]]:
    """Return the lengths in tokens and the number of sequences of each run, from [S + 1] boundaries of each tensor.

    Example:
        >>> equal_runs(torch.tensor([0, 3, 6, 8]), torch.tensor([0, 5, 10, 12]))
        [((3, 5), 2), ((2, 2), 1)]
    """
    lengths = (tuple(b - a for a, b in pairwise(cu_seqlens.tolist())) for cu_seqlens in boundaries)
    return [(length, len(list(run))) for length, run in groupby(zip(*lengths, strict=True))]


def map_runs(function: Callable[..., Tensor], *packed: tuple[Tensor, Tensor]) -> Tensor:
    """Call a function of independent sequences once per run; concatenate its results, [T, ...] as the first tensor.

    Args:
        function: Takes a batch [N, L, ...] of each packed tensor, N sequences of its own L tokens, and returns that of
            the first one's shape.
        *packed: [T, ...] and its [S + 1] boundaries, from 0 to T, each.
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
