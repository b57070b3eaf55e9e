"""The rows that a rank reads."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.plan import MicroBatch


def rank_rows(micros: Sequence[MicroBatch]) -> NDArray[np.int64]:
    """Return all rows of the micro-batches, ascending."""
    return np.unique(np.fromiter((row for micro in micros for row in micro.rows), dtype=np.int64))
