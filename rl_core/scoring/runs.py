"""Runs of consecutive sequences of equal length in a packed row: each is a batch without padding."""

from collections.abc import Callable
from itertools import groupby, pairwise

import torch
from torch import Tensor


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
