"""Selection on batch handles: `select`, `concat`, `with_column` and others rewrite row ranges; no data is moved.

N rows of a batch. A group's rows are numbered over the concatenation of its chunks; its segments are the ranges of
these that make up the batch's rows, in order. Views of views stay flat, and adjacent ranges are merged.

Example:
    >>> from schemas.batch import ChunkRef
    >>> chunk = ChunkRef(key="demo/0/rollout/0/0", num_rows=3, num_bytes=64, incarnation="a")
    >>> batch = new_batch("demo", 0, 0, [chunk], {"reward": "float"}, [4, 4, 5], [7, 2, 9])
    >>> view = select(batch, [2, 0])
    >>> view.num_rows, decode_ints(view.response_lengths).tolist()
    (2, [9, 7])
    >>> advantages = ChunkRef(key="demo/0/advantage/0/0", num_rows=2, num_bytes=64, incarnation="a")
    >>> with_column(view, {"advantages": "float"}, [advantages], [0, 1]).columns
    ('reward', 'advantages')
"""

from rl_core.views.chunks import concat
from rl_core.views.integers import decode_ints, encode_ints
from rl_core.views.segments import ReadPlan, read_plan
from rl_core.views.selection import new_batch, number_prompts, select, split, with_column, with_groups

__all__ = [
    "ReadPlan",
    "concat",
    "decode_ints",
    "encode_ints",
    "new_batch",
    "number_prompts",
    "read_plan",
    "select",
    "split",
    "with_column",
    "with_groups",
]
