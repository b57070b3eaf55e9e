"""Any chain of views, compared with the same operations on a list of rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_core.views import concat, select, split, with_column
from schemas.batch import BatchHandle
from tests.unit.rl_core.stored_batches import Stored, batch, chunks, pieces, prune, rows_of, stored_batches


def draw_view(data: st.DataObject, view: BatchHandle, model: list[int]) -> tuple[BatchHandle, list[int]]:
    """Draw an operation, and apply it to a view and to a list of its rows."""
    every = st.integers(0, max(len(model) - 1, 0))
    kind = data.draw(st.sampled_from(["select", "slice", "permute", "repeat", "filter", "concat", "split", "prune"]))
    if kind == "select":
        rows = data.draw(st.lists(every, max_size=8 if model else 0))
        return select(view, rows), [model[row] for row in rows]
    if kind == "slice":
        start = data.draw(st.integers(0, len(model)))
        stop = data.draw(st.integers(start, len(model)))
        return select(view, range(start, stop)), model[start:stop]
    if kind == "permute":
        order = data.draw(st.permutations(range(len(model))))
        return select(view, order), [model[row] for row in order]
    if kind == "repeat":
        counts = data.draw(st.lists(st.integers(0, 2), min_size=len(model), max_size=len(model)))
        repeated = [row for row, count in zip(model, counts, strict=True) for _ in range(count)]
        rows = np.repeat(np.arange(len(model)), np.array(counts, np.int64))
        return select(view, rows), repeated
    if kind == "filter":
        keep = data.draw(st.lists(st.booleans(), min_size=len(model), max_size=len(model)))
        return select(view, np.flatnonzero(keep)), [row for row, kept in zip(model, keep, strict=True) if kept]
    if kind == "prune":
        return prune(view), model
    cuts = sorted(data.draw(st.lists(st.integers(0, len(model)), max_size=3)))
    bounds = list(zip([0, *cuts], [*cuts, len(model)], strict=True))
    parts = split(view, [stop - start for start, stop in bounds])
    if kind == "split":
        at = data.draw(st.integers(0, len(cuts)))
        return parts[at], model[slice(*bounds[at])]
    places = data.draw(st.lists(st.integers(0, len(cuts)), min_size=1, max_size=4))
    some = [prune(parts[at]) if data.draw(st.booleans()) else parts[at] for at in places]
    return concat(some), [row for at in places for row in model[slice(*bounds[at])]]


@given(st.data(), stored_batches())
def test_any_chain_of_views_selects_like_a_list(data: st.DataObject, stored: Stored) -> None:
    view, model = stored.batch, list(range(stored.batch.num_rows))
    for _ in range(data.draw(st.integers(1, 4))):
        view, model = draw_view(data, view, model)
        stored.check(view, model)
    small = prune(view)
    stored.check(small, model)
    for group in small.groups:
        assert {at for at, _, _ in pieces(group)} == set(range(len(group.chunks)))


@given(st.data(), stored_batches())
def test_views_of_the_same_rows_are_equal_however_they_are_made(data: st.DataObject, stored: Stored) -> None:
    view, model = select(stored.batch, range(stored.batch.num_rows)), list(range(stored.batch.num_rows))
    assert view == stored.batch
    for _ in range(3):
        every = st.integers(0, max(len(model) - 1, 0))
        rows = data.draw(st.lists(every, max_size=8 if model else 0))
        view, model = select(view, rows), [model[row] for row in rows]
    assert view == select(stored.batch, model)
    cut = data.draw(st.integers(0, len(model)))
    assert concat(split(view, [cut, len(model) - cut])) == view


@given(st.data())
def test_a_column_added_to_any_view_follows_later_views(data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(5)))
    stored = data.draw(st.permutations(range(5)))  # row i of the new chunk is row stored[i] of the view
    view = with_column(select(batch(), order), {"advantages": "float"}, chunks([5], "advantage"), stored)
    again = data.draw(st.lists(st.integers(0, 4), max_size=6))
    assert rows_of(select(view, again).groups[1]) == [stored.index(row) for row in again]
    assert rows_of(select(view, again).groups[0]) == [order[row] for row in again]
