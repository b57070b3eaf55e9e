"""Positions whose frequencies depend on a sequence's length (LongRoPE, arXiv:2402.13753): each has those of its own.

transformers chooses the frequencies of a whole forward by its longest sequence, so that a sequence's log-probs would
depend on what it is batched with. N rows, T positions each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

_KIND = "longrope"


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
