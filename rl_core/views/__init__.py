"""Selection on batch handles: every view rewrites row ranges; no payload moves until a store reads it.

N rows of a batch. A group's rows are numbered over the concatenation of its chunks; its segments say which of
these make up the batch's rows, in order. Views of views stay flat, and adjacent ranges are always merged.
"""

from rl_core.views.packed import pack, read_plan, unpack
from rl_core.views.selection import (
    concat,
    new_batch,
    permute,
    select,
    slice_rows,
    split,
    with_column,
)

__all__ = [
    "concat",
    "new_batch",
    "pack",
    "permute",
    "read_plan",
    "select",
    "slice_rows",
    "split",
    "unpack",
    "with_column",
]
