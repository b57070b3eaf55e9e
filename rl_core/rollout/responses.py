"""What the driver knows of responses, whose tokens it never has: numbers of each, and metrics of them. N rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.views.integers import IntsLike, as_int64
from schemas.metrics import Mean, Metrics
from schemas.rollout import RolloutHandle
from schemas.summary import LengthHistogram

# Buckets of lengths that are the same in every step and every run.
_DOUBLINGS = 24  # up to 16 million tokens
EDGES = (0, 1, 2, *(edge for power in range(1, _DOUBLINGS) for edge in (3 * 2 ** (power - 1), 2 ** (power + 1))))
"""The buckets' edges in tokens: two buckets per doubling."""


def describe_responses(
    token_ids: Sequence[NDArray[Any]], loss_masks: Sequence[NDArray[np.bool_]], finish_reasons: Sequence[str]
) -> dict[str, list[int]]:
    """Return the fields of a `RolloutShard` that follow from its responses' tokens.

    Called by the worker that has the responses, and by what reads their columns again: for a replay, or for a step that
    trains on them once more.

    Args:
        token_ids: N of [R] integers, each response's tokens.
        loss_masks: N of [R], true where the model sampled the token.
        finish_reasons: N.

    Example:
        >>> ids, masks = [np.array([5, 6, 7]), np.array([8])], [np.array([True, False, True]), np.array([True])]
        >>> describe_responses(ids, masks, ["length", "stop"])
        {'response_lengths': [3, 1], 'loss_tokens': [2, 1], 'truncated': [1, 0]}
    """
    return {
        "response_lengths": [len(ids) for ids in token_ids],
        "loss_tokens": [int(mask.sum()) for mask in loss_masks],
        "truncated": [int(reason == "length") for reason in finish_reasons],
    }


def response_metrics(rollout: RolloutHandle) -> Metrics:
    """Return the means over rows of what `describe_responses` tells of each; absent if no row has it.

    Example:
        >>> from schemas.rollout import RolloutShard
        >>> ids, masks = [np.array([5, 6, 7]), np.array([8])], [np.array([True, False, True]), np.array([True])]
        >>> scalars = describe_responses(ids, masks, ["length", "stop"])
        >>> row = {"rewards": (1.0, 0.0), "group_ids": (0, 0), "prompt_lengths": (2, 2)}
        >>> shard = RolloutShard(shard=0, worker=0, groups=(0,), **row, **scalars)
        >>> found = response_metrics(RolloutHandle(step=0, policy_version=0, shards=(shard,)))
        >>> {name: metric.value for name, metric in found.items()}
        {'response/tokens': 1.5, 'response/truncated': 0.5}
    """
    of_rows = {"response/tokens": rollout.loss_tokens, "response/truncated": rollout.truncated}
    return {name: Mean(total=int(as_int64(n).sum()), weight=len(n)) for name, n in of_rows.items() if n}


def count_lengths(lengths: IntsLike) -> LengthHistogram:
    """Count response lengths, in tokens, per bucket: those between the shortest and the longest one.

    Raises:
        ValueError: There are no lengths.

    Example:
        >>> count_lengths([5, 5, 7, 13])
        LengthHistogram(edges=(4, 6, 8, 12, 16), num_rows=(2, 1, 0, 1))
    """
    counts = np.bincount(np.searchsorted(EDGES, as_int64(lengths), side="right") - 1)
    if not len(counts):
        raise ValueError("no lengths to count")
    first = int(np.flatnonzero(counts)[0])
    return LengthHistogram(edges=EDGES[first : len(counts) + 1], num_rows=tuple(counts[first:].tolist()))
