"""The distribution of a step's response lengths, in buckets that are the same in every step and every run."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable

from schemas.summary import LengthHistogram

_DOUBLINGS = 24  # up to 16 million tokens
EDGES = (0, 1, 2, *(edge for power in range(1, _DOUBLINGS) for edge in (3 * 2 ** (power - 1), 2 ** (power + 1))))
"""The buckets' edges in tokens: two buckets per doubling."""


def count_lengths(lengths: Iterable[int]) -> LengthHistogram:
    """Count response lengths, in tokens, per bucket: those between the shortest and the longest one.

    Raises:
        ValueError: There are no lengths.

    Example:
        >>> count_lengths([5, 5, 7, 13])
        LengthHistogram(edges=(4, 6, 8, 12, 16), num_rows=(2, 1, 0, 1))
    """
    buckets = Counter(bisect_right(EDGES, length) - 1 for length in lengths)
    if not buckets:
        raise ValueError("no lengths to count")
    first, last = min(buckets), max(buckets)
    return LengthHistogram(
        edges=EDGES[first : last + 2], num_rows=tuple(buckets[number] for number in range(first, last + 1))
    )
