"""Statistics of single columns, for summaries.

N rows.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rl_core.columns.jagged import is_jagged
from schemas.summary import ColumnStats, LengthHistogram

NUM_BINS = 10
LOG_BINS_FROM = 20  # ratio of the longest to the shortest from which bins of growing width show more


def length_histogram(lengths: npt.NDArray[np.int64]) -> LengthHistogram | None:
    """Count `lengths`, [N], in at most `NUM_BINS` bins: of equal width or, if they differ a lot, of growing width."""
    if not lengths.size:
        return None
    low, stop = int(lengths.min()), int(lengths.max()) + 1
    if stop > LOG_BINS_FROM * max(low, 1):
        cuts = np.geomspace(low + 1, stop + 1, NUM_BINS + 1) - 1
    else:
        cuts = np.linspace(low, stop, NUM_BINS + 1)
    edges = np.unique(np.rint(cuts).astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    return LengthHistogram(edges=tuple(edges.tolist()), num_rows=tuple(counts.tolist()))


def summarize_values(column: pa.Array) -> ColumnStats:
    """Return the statistics of one column of N rows."""
    values = column.flatten() if is_jagged(column) else column
    if pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    counts = {
        "num_rows": len(column),
        "num_values": len(values),
        "num_bytes": column.nbytes,
        "num_nulls": values.null_count,
    }
    if pa.types.is_string(values.type):
        return ColumnStats(**counts, num_nonfinite=0)
    known = values.drop_null()
    finite = known.filter(pc.is_finite(known)) if pa.types.is_floating(known.type) else known
    counts["num_nonfinite"] = len(known) - len(finite)
    if not len(finite):
        return ColumnStats(**counts)
    extremes = pc.min_max(finite)
    return ColumnStats(
        **counts,
        minimum=extremes["min"].as_py(),
        mean=pc.mean(finite).as_py(),
        maximum=extremes["max"].as_py(),
    )
