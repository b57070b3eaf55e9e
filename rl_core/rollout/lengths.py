"""The distribution of a step's response lengths, in buckets that are the same in every step and every run."""

import numpy as np

from rl_core.views.integers import IntsLike, as_int64
from schemas.summary import LengthHistogram

_DOUBLINGS = 24  # up to 16 million tokens
EDGES = (0, 1, 2, *(edge for power in range(1, _DOUBLINGS) for edge in (3 * 2 ** (power - 1), 2 ** (power + 1))))
"""The buckets' edges in tokens: two buckets per doubling."""


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
