import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.views import (
    concat,
    new_batch,
    pack,
    permute,
    read_plan,
    select,
    slice_rows,
    split,
    unpack,
    with_column,
)
from schemas.batch import BatchHandle, ChunkRef, ColumnGroup
from schemas.errors import ColumnError


def chunks(sizes: Sequence[int], stage: str = "rollout") -> list[ChunkRef]:
    return [
        ChunkRef(key=f"run/1/{stage}/{at}/0", num_rows=size, num_bytes=64, generation="g")
        for at, size in enumerate(sizes)
    ]


def batch(sizes: Sequence[int] = (3, 0, 2)) -> BatchHandle:
    rows = np.arange(sum(sizes))
    return new_batch("run", 1, 0, chunks(sizes), {"response_ids": "uint16", "reward": "float"}, rows + 1, rows * 2)


def rows_of(group: ColumnGroup) -> list[int]:
    """The group's rows, numbered over its chunks, as its read plan gives them."""
    bounds = np.cumsum([0, *(chunk.num_rows for chunk in group.chunks)])
    return [int(bounds[at] + row) for at, start, stop in read_plan(group) for row in range(start, stop)]


def check(view: BatchHandle, rows: Sequence[int]) -> None:
    """A view of `batch()` has these of its rows, in every group and in the lengths, in canonical form."""
    expected = np.asarray(rows, dtype=np.int64)
    assert view.num_rows == expected.size
    assert unpack(view.prompt_lengths).tolist() == (expected + 1).tolist()
    assert unpack(view.response_lengths).tolist() == (expected * 2).tolist()
    for group in view.groups:
        assert rows_of(group) == expected.tolist()
        starts, counts = unpack(group.segments.starts), unpack(group.segments.counts)
        assert (counts > 0).all()
        assert (starts[1:] != (starts + counts)[:-1]).all(), "adjacent ranges are merged"
    assert BatchHandle.model_validate_json(view.model_dump_json()) == view


@given(st.lists(st.integers(0, 2**62)))
def test_packed_integers_come_back(values: list[int]) -> None:
    assert unpack(pack(values)).tolist() == values
    assert unpack(pack(values)).dtype == np.int64


@pytest.mark.parametrize(("high", "dtype"), [(255, "u1"), (256, "u2"), (65536, "u4"), (2**32, "u8")])
def test_integers_are_packed_narrowly(high: int, dtype: str) -> None:
    assert pack([0, high]).dtype == dtype


def test_equal_integers_are_packed_as_one() -> None:
    assert len(pack([7] * 10**6).data) == 4
    assert unpack(pack([7] * 3)).tolist() == [7, 7, 7]


def test_what_is_not_packable_is_refused() -> None:
    with pytest.raises(ValueError, match="can't pack -1"):
        pack([3, -1])
    with pytest.raises(TypeError, match="float64"):
        pack(np.array([1.0]))
    with pytest.raises(TypeError, match="bool"):
        pack(np.array([True]))
    with pytest.raises(ValueError, match="1-D"):
        pack(np.zeros((2, 2), np.int64))
    with pytest.raises(ValueError, match="don't hold 5"):
        unpack(pack([1, 2]).replace(size=5))


def test_a_new_batch_is_its_chunks_in_order_in_constant_size() -> None:
    check(batch(), [0, 1, 2, 3, 4])
    assert read_plan(batch().groups[0]) == [(0, 0, 3), (2, 0, 2)]
    small, large = (len(batch([size]).groups[0].model_dump_json()) for size in (10, 10**6))
    assert large - small < 16


def test_a_new_batch_is_checked() -> None:
    one = chunks([2])
    with pytest.raises(ColumnError, match="3 response lengths for chunks of 2 rows"):
        new_batch("run", 1, 0, one, {"reward": "float"}, [1, 1], [1, 1, 1])
    with pytest.raises(ColumnError, match="'colour' is not in the catalogue"):
        new_batch("run", 1, 0, one, {"colour": "float"}, [1, 1], [1, 1])
    with pytest.raises(ColumnError, match="'reward' is double"):
        new_batch("run", 1, 0, one, {"reward": "double"}, [1, 1], [1, 1])
    with pytest.raises(ColumnError, match="named twice"):
        new_batch("run", 1, 0, one * 2, {"reward": "float"}, [1] * 4, [1] * 4)


def test_adjacent_rows_merge_over_a_chunk_border_and_split_in_the_plan() -> None:
    view = select(batch(), [4, 1, 2, 3])
    check(view, [4, 1, 2, 3])
    assert unpack(view.groups[0].segments.counts).tolist() == [1, 3]
    assert read_plan(view.groups[0]) == [(2, 1, 2), (0, 1, 3), (2, 0, 1)]


def test_an_empty_selection_keeps_columns_and_dtypes() -> None:
    view = select(batch(), [])
    check(view, [])
    assert view.groups[0].dtypes == {"response_ids": "uint16", "reward": "float"}
    check(concat([view, batch()]), [0, 1, 2, 3, 4])
    check(select(view, []), [])


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_outside_the_batch_is_refused(row: int) -> None:
    for call in (select, permute):
        with pytest.raises(IndexError, match=f"row {row} is not in a batch of 5 rows"):
            call(batch(), [0, row])


def test_a_mask_is_not_a_selection() -> None:
    with pytest.raises(TypeError, match="bool"):
        select(batch(), np.array([True, False, True, False, False]))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 6)])
def test_a_range_outside_the_batch_is_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="5 rows"):
        slice_rows(batch(), start, stop)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 1, 2, 3, 3], [0, 1, 2, 3, 4, 4]])
def test_a_permutation_has_every_row_once(order: list[int]) -> None:
    with pytest.raises(ValueError, match="permutation of 5 rows"):
        permute(batch(), order)


@pytest.mark.parametrize("counts", [[2, 2], [6, -1], [6]])
def test_a_split_has_every_row_once(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="don't split a batch of 5 rows"):
        split(batch(), counts)


def test_splits_put_back_together_are_the_batch() -> None:
    parts = split(batch(), [1, 0, 3, 1])
    assert [part.num_rows for part in parts] == [1, 0, 3, 1]
    check(parts[2], [1, 2, 3])
    assert concat(parts) == batch()


def test_batches_over_different_chunks_are_put_together() -> None:
    left, right = batch([2, 1]), batch([3])
    right = right.replace(groups=(right.groups[0].replace(chunks=tuple(chunks([3], "other"))),))
    both = concat([select(left, [2, 0]), right, slice_rows(left, 1, 2)])
    assert [chunk.key for chunk in both.groups[0].chunks] == [
        "run/1/rollout/0/0",
        "run/1/rollout/1/0",
        "run/1/other/0/0",
    ]
    assert read_plan(both.groups[0]) == [(1, 0, 1), (0, 0, 1), (2, 0, 3), (0, 1, 2)]


def test_batches_that_group_their_columns_differently_are_put_together() -> None:
    def stored(stage: str) -> list[ChunkRef]:
        return chunks([5], stage)

    apart = with_column(batch(), {"behavior_logprobs": "float"}, stored("a"), range(5))
    apart = with_column(apart, {"reference_logprobs": "float"}, stored("b"), range(5))
    joint = with_column(batch(), {"behavior_logprobs": "float", "reference_logprobs": "float"}, stored("c"), range(5))
    both = concat([apart, joint])
    assert both.columns == apart.columns
    assert [[chunk.key for chunk in group.chunks] for group in both.groups[1:]] == [
        ["run/1/a/0/0", "run/1/c/0/0"],
        ["run/1/b/0/0", "run/1/c/0/0"],
    ]
    assert all(rows_of(group) == list(range(10)) for group in both.groups[1:])


def test_batches_of_different_kinds_are_not_put_together() -> None:
    with pytest.raises(ValueError, match="no batches"):
        concat([])
    with pytest.raises(ValueError, match="different"):
        concat([batch(), batch().replace(step=2)])
    extended = with_column(batch(), {"advantages": "float"}, chunks([5], "advantage"), range(5))
    for pair in ([batch(), extended], [extended, batch()]):
        with pytest.raises(ColumnError, match="different columns"):
            concat(pair)


def test_a_column_stored_in_another_order_comes_back_in_the_batchs() -> None:
    view = with_column(batch(), {"advantages": "float"}, chunks([2, 3], "advantage"), [3, 0, 1, 4, 2])
    assert view.columns == ("response_ids", "reward", "advantages")
    assert read_plan(view.groups[1]) == [(0, 1, 2), (1, 0, 1), (1, 2, 3), (0, 0, 1), (1, 1, 2)]


@pytest.mark.parametrize(
    ("sizes", "rows", "message"),
    [
        ([5], [0, 1, 2, 3, 3], "hold row 3 2 times"),
        ([4], [0, 1, 2, 3], "hold row 4 0 times"),
        ([5], [0, 1, 2, 3, 5], "name row 5 of a batch of 5"),
        ([5], [0, 1, 2, 3, -1], "name row -1"),
        ([4], [0, 1, 2, 3, 4], "5 row numbers for chunks of 4 rows"),
    ],
)
def test_a_column_covers_every_row_once(sizes: list[int], rows: list[int], message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        with_column(batch(), {"advantages": "float"}, chunks(sizes, "advantage"), rows)


def test_a_column_is_added_once() -> None:
    with pytest.raises(ColumnError, match="'reward' is already"):
        with_column(batch(), {"reward": "float"}, chunks([5], "again"), range(5))


@given(st.data())
def test_any_chain_of_views_selects_like_an_index_array(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    view, model = batch(sizes), np.arange(sum(sizes))
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["select", "slice", "permute", "concat"]))
        if kind == "select":
            every = st.integers(0, max(model.size - 1, 0))
            rows = np.array(data.draw(st.lists(every, max_size=8 if model.size else 0)), dtype=np.int64)
            view, model = select(view, rows), model[rows]
        elif kind == "slice":
            start = data.draw(st.integers(0, model.size))
            stop = data.draw(st.integers(start, model.size))
            view, model = slice_rows(view, start, stop), model[start:stop]
        elif kind == "permute":
            order = np.array(data.draw(st.permutations(range(model.size))), dtype=np.int64)
            view, model = permute(view, order), model[order]
        else:
            cut = data.draw(st.integers(0, model.size))
            left, right = split(view, [cut, model.size - cut])
            view, model = (
                concat([right, left, right]),
                np.concatenate([model[cut:], model[:cut], model[cut:]]),
            )
        check(view, model.tolist())


@given(st.data())
def test_a_column_added_to_any_view_follows_later_views(data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(5)))
    stored = data.draw(st.permutations(range(5)))  # row i of the new chunk is row stored[i] of the view
    view = with_column(permute(batch(), order), {"advantages": "float"}, chunks([5], "advantage"), stored)
    again = data.draw(st.lists(st.integers(0, 4), max_size=6))
    assert rows_of(select(view, again).groups[1]) == [stored.index(row) for row in again]
    assert rows_of(select(view, again).groups[0]) == [order[row] for row in again]


def test_a_million_rows_are_permuted_without_a_loop() -> None:
    large = batch([10**6])
    order = np.random.default_rng(0).permutation(10**6)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        permute(large, order)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5  # about 0.12; CPU time, so a busy machine does not matter
