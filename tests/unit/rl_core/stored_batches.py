"""Batch handles over made-up chunks, and checks of their views."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from rl_core.views import (
    decode_ints,
    new_batch,
    read_plan,
    with_column,
)
from rl_core.views.segments import chunk_bounds, merge
from schemas.batch import BatchHandle, ChunkRef, ColumnGroup


def chunks(sizes: Sequence[int], stage: str = "rollout") -> list[ChunkRef]:
    return [
        ChunkRef(key=f"run/1/{stage}/{at}/0", num_rows=size, num_bytes=64, incarnation="g")
        for at, size in enumerate(sizes)
    ]


def batch(sizes: Sequence[int] = (3, 0, 2)) -> BatchHandle:
    rows = np.arange(sum(sizes))
    return new_batch("run", 1, 0, chunks(sizes), {"response_ids": "uint16", "reward": "float"}, rows + 1, rows * 2)


def pieces(group: ColumnGroup) -> list[tuple[int, int, int]]:
    plan = read_plan(group)
    assert {part.dtype for part in (plan.chunk, plan.start, plan.stop)} == {np.dtype(np.int64)}
    return list(zip(plan.chunk.tolist(), plan.start.tolist(), plan.stop.tolist(), strict=True))


def prune(batch: BatchHandle) -> BatchHandle:
    """Drop the chunks without rows of the batch, so that they needn't be listed, fetched or kept in memory."""
    return batch.replace(groups=tuple(_prune_group(group) for group in batch.groups))


def _prune_group(group: ColumnGroup) -> ColumnGroup:
    plan = read_plan(group)
    used = np.bincount(plan.chunk, minlength=len(group.chunks)) > 0
    if used.all():
        return group
    chunks = tuple(chunk for chunk, kept in zip(group.chunks, used, strict=True) if kept)
    first = chunk_bounds(chunks)[np.cumsum(used) - 1]  # of each used chunk
    segments = merge(plan.start + first[plan.chunk], plan.stop - plan.start)
    return group.replace(chunks=chunks, segments=segments)


def rows_of(group: ColumnGroup) -> list[int]:
    """Return the rows of the group's read plan, numbered over its chunks."""
    bounds = np.cumsum([0, *(chunk.num_rows for chunk in group.chunks)])
    return [int(bounds[at] + row) for at, start, stop in pieces(group) for row in range(start, stop)]


def check(view: BatchHandle, rows: Sequence[int]) -> None:
    """Check that a view of `batch()` has these rows in every group and in the lengths, in canonical form."""
    assert all(rows_of(group) == list(rows) for group in view.groups)
    check_form(view, rows)


def check_form(view: BatchHandle, rows: Sequence[int]) -> None:
    """Check that a view has the lengths of these rows of `batch()`, and few ranges, none empty."""
    assert view.num_rows == len(rows)
    assert decode_ints(view.prompt_lengths).tolist() == [row + 1 for row in rows]
    assert decode_ints(view.response_lengths).tolist() == [row * 2 for row in rows]
    for group in view.groups:
        assert all(start < stop for _, start, stop in pieces(group))
        starts, counts = decode_ints(group.segments.starts), decode_ints(group.segments.counts)
        assert (counts > 0).all()
        neighbors = np.count_nonzero(starts[1:] == (starts + counts)[:-1])
        assert neighbors == 0 or (64 * neighbors < len(rows) and (counts == 1).all())
    assert BatchHandle.model_validate_json(view.model_dump_json()) == view
    assert BatchHandle.model_validate(view.model_dump(mode="json")) == view


class Stored:
    """A batch of three groups that store its rows in different orders, and the batch row of each stored row."""

    def __init__(self, sizes: Sequence[int], orders: Sequence[Sequence[int]]) -> None:
        self.rows: dict[str, list[int]] = {}
        self.batch = batch(sizes)
        self._put(self.batch.groups[0].chunks, range(self.batch.num_rows))
        for name, order in zip(("advantages", "behavior_logprobs"), orders, strict=True):
            refs = chunks(sizes[::-1], name)
            self._put(refs, order)
            self.batch = with_column(self.batch, {name: "float"}, refs, order)

    def _put(self, refs: Sequence[ChunkRef], rows: Sequence[int]) -> None:
        bounds = np.cumsum([0, *(ref.num_rows for ref in refs)])
        for ref, start, stop in zip(refs, bounds, bounds[1:], strict=False):
            self.rows[ref.key] = list(rows[start:stop])

    def check(self, view: BatchHandle, rows: Sequence[int]) -> None:
        """Check that reading any column of the view returns these rows."""
        assert view.columns == self.batch.columns
        for group in view.groups:
            read = [self.rows[group.chunks[at].key][start:stop] for at, start, stop in pieces(group)]
            assert [row for piece in read for row in piece] == list(rows)
        assert [group.dtypes for group in view.groups] == [group.dtypes for group in self.batch.groups]
        check_form(view, rows)


@st.composite
def stored_batches(draw: st.DrawFn) -> Stored:
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    return Stored(sizes, [draw(st.permutations(range(sum(sizes)))) for _ in range(2)])
