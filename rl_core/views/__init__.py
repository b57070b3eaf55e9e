"""Selection on batch handles: `select`, `concat`, `with_column` and others rewrite row ranges; no data is moved.

N rows of a batch. A group's rows are numbered over the concatenation of its chunks; its segments are the ranges of
these that make up the batch's rows, in order. Views of views stay flat, and adjacent ranges are merged.
"""

from rl_core.views.chunks import concat, prune
from rl_core.views.integers import decode_ints, encode_ints
from rl_core.views.segments import ReadPlan, read_plan
from rl_core.views.selection import (
    filter_rows,
    new_batch,
    permute,
    repeat,
    select,
    slice_rows,
    split,
    with_column,
)

__all__ = [
    "ReadPlan",
    "concat",
    "decode_ints",
    "encode_ints",
    "filter_rows",
    "new_batch",
    "permute",
    "prune",
    "read_plan",
    "repeat",
    "select",
    "slice_rows",
    "split",
    "with_column",
]
