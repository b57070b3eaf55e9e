from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.views import (
    concat,
    decode_ints,
    encode_ints,
    filter_rows,
    new_batch,
    permute,
    prune,
    read_plan,
    repeat,
    select,
    slice_rows,
    split,
    with_column,
)
from schemas.batch import BatchHandle, ChunkRef, ColumnGroup, EncodedInts, Segments
from schemas.errors import ColumnError


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


def rows_of(group: ColumnGroup) -> list[int]:
    """The group's rows, numbered over its chunks, as its read plan gives them."""
    bounds = np.cumsum([0, *(chunk.num_rows for chunk in group.chunks)])
    return [int(bounds[at] + row) for at, start, stop in pieces(group) for row in range(start, stop)]


def check(view: BatchHandle, rows: Sequence[int]) -> None:
    """A view of `batch()` has these of its rows, in every group and in the lengths, in canonical form."""
    assert all(rows_of(group) == list(rows) for group in view.groups)
    check_form(view, rows)


def check_form(view: BatchHandle, rows: Sequence[int]) -> None:
    """A view has the lengths of these rows of `batch()`, and few ranges, none empty."""
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
    """A batch of three groups that hold its rows in different orders, and which row each stored one is."""

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
        """What a reader gets for every column of the view is these rows."""
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


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_encoded_integers_survive_a_round_trip(values: list[int]) -> None:
    packed = encode_ints(values)
    assert decode_ints(packed).tolist() == values
    assert decode_ints(packed).dtype == np.int64
    assert EncodedInts.model_validate_json(packed.model_dump_json()) == packed


@given(st.lists(st.integers(0, 255)), st.integers(0, 2**40), st.sampled_from(["uint8", "int16", "uint64", ">i4"]))
def test_equal_integers_have_equal_encodings(values: list[int], base: int, dtype: str) -> None:
    assert encode_ints(np.array(values, dtype), base) == encode_ints([base + value for value in values])
    assert encode_ints(np.repeat(np.array(values, dtype), 2)[::2], base) == encode_ints(np.array(values, dtype), base)


@pytest.mark.parametrize("base", [0, 1000])
@pytest.mark.parametrize("num_bytes", range(1, 9))
def test_integers_take_as_few_bytes_as_their_range_needs(base: int, num_bytes: int) -> None:
    for span in (256 ** (num_bytes - 1), 256**num_bytes - 1):
        values = [base, base + min(span, 2**62), base]
        packed = encode_ints(values)
        assert packed.dtype == f"u{num_bytes}"
        assert len(packed.model_dump()["data"]) == 4 * num_bytes
        assert decode_ints(packed).tolist() == values


def test_equal_integers_take_constant_space() -> None:
    assert len(encode_ints([7] * 10**6).model_dump_json()) < 60
    assert decode_ints(encode_ints([7] * 3)).tolist() == [7, 7, 7]


def test_other_values_are_not_encoded() -> None:
    with pytest.raises(ValueError, match="can't encode -1"):
        encode_ints([3, -1])
    with pytest.raises(ValueError, match="does not fit in int64"):
        encode_ints(np.array([2**63], dtype=np.uint64))
    with pytest.raises(TypeError, match="float64"):
        encode_ints(np.array([1.0]))
    with pytest.raises(TypeError, match="bool"):
        encode_ints(np.array([True]))
    with pytest.raises(ValueError, match="1-D"):
        encode_ints(np.zeros((2, 2), np.int64))
    with pytest.raises(ValueError, match="2 bytes don't hold 5 integers"):
        encode_ints([1, 2]).replace(size=5)


def test_a_new_batch_is_its_chunks_in_order_in_constant_size() -> None:
    check(batch(), [0, 1, 2, 3, 4])
    assert pieces(batch().groups[0]) == [(0, 0, 3), (2, 0, 2)]
    small, large = (len(batch([size]).groups[0].model_dump_json()) for size in (10, 10**6))
    assert large - small < 16


def test_a_new_batch_is_checked() -> None:
    one = chunks([2])
    with pytest.raises(ColumnError, match="3 response lengths for chunks of 2 rows"):
        new_batch("run", 1, 0, one, {"reward": "float"}, [1, 1], [1, 1, 1])
    with pytest.raises(ColumnError, match="'color' is not in the catalog"):
        new_batch("run", 1, 0, one, {"color": "float"}, [1, 1], [1, 1])
    with pytest.raises(ColumnError, match="'reward' is double"):
        new_batch("run", 1, 0, one, {"reward": "double"}, [1, 1], [1, 1])
    with pytest.raises(ColumnError, match="listed twice"):
        new_batch("run", 1, 0, one * 2, {"reward": "float"}, [1] * 4, [1] * 4)


def test_adjacent_rows_merge_over_a_chunk_border_and_split_in_the_plan() -> None:
    view = select(batch(), [4, 1, 2, 3])
    check(view, [4, 1, 2, 3])
    assert decode_ints(view.groups[0].segments.counts).tolist() == [1, 3]
    assert pieces(view.groups[0]) == [(2, 1, 2), (0, 1, 3), (2, 0, 1)]


def test_an_empty_selection_keeps_columns_and_dtypes() -> None:
    view = select(batch(), [])
    check(view, [])
    assert view.groups[0].dtypes == {"response_ids": "uint16", "reward": "float"}
    check(concat([view, batch()]), [0, 1, 2, 3, 4])
    assert concat([prune(view), prune(view)]) == prune(view)
    check(select(view, []), [])
    for empty in (slice_rows(batch(), 2, 2), repeat(batch(), 0), filter_rows(batch(), np.zeros(5, np.bool_))):
        assert empty == view
    assert split(view, [0, 0]) == [view, view]
    assert permute(view, []) == repeat(view, 3) == filter_rows(view, np.zeros(0, np.bool_)) == view
    assert prune(view).groups[0].chunks == ()
    assert prune(view).groups[0].dtypes == view.groups[0].dtypes
    assert with_column(prune(view), {"advantages": "float"}, [], []).columns == (*view.columns, "advantages")


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_outside_the_batch_is_rejected(row: int) -> None:
    views = [
        batch(),
        select(repeat(batch(), 2), [0, 9, 3, 4, 5]),
        slice_rows(batch([4, 5]), 2, 7),
        split(batch([2, 6]), [1, 5, 2])[1],
        prune(filter_rows(batch([3, 3]), np.arange(6) != 4)),
        concat(split(batch(), [2, 3])),
    ]
    for view in views:
        for call in (select, permute):
            with pytest.raises(IndexError, match=f"row {row} is not in a batch of 5 rows"):
                call(view, [0, row])


def test_a_mask_is_not_a_selection() -> None:
    with pytest.raises(TypeError, match="bool"):
        select(batch(), np.array([True, False, True, False, False]))


def test_rows_are_kept_by_a_condition_on_a_scalar() -> None:
    rewards = np.array([0.5, -1.0, np.nan, 0.0, 2.0])
    check(filter_rows(batch(), rewards > 0), [0, 4])


@pytest.mark.parametrize("keep", [[True] * 5, np.array([0, 4]), np.ones(5), None])
def test_filter_rows_rejects_other_values_than_masks(keep: object) -> None:
    with pytest.raises(TypeError, match=r"expected an array of bool, got (list|int64|float64|NoneType); use select"):
        filter_rows(batch(), keep)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(4,), (6,), (5, 1), (0,)])
def test_a_mask_has_one_bool_per_row(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"one bool for each of the 5 rows, got shape \("):
        filter_rows(batch(), np.ones(shape, np.bool_))


def test_rows_are_repeated_in_place() -> None:
    check(repeat(batch(), [2, 0, 1, 0, 3]), [0, 0, 2, 4, 4, 4])
    check(repeat(batch(), 2), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    assert repeat(batch(), np.int32(1)) == batch()


def test_counts_of_a_repeat_are_checked() -> None:
    with pytest.raises(ValueError, match="row 2 can't be repeated -1 times"):
        repeat(batch(), [1, 1, -1, 1, -7])
    with pytest.raises(ValueError, match="row 0 can't be repeated -1 times"):
        repeat(batch(), -1)
    with pytest.raises(ValueError, match="4 counts for a batch of 5 rows"):
        repeat(batch(), [1] * 4)
    with pytest.raises(ValueError, match="1-D"):
        repeat(batch(), np.ones((5, 1), np.int64))
    for counts in (True, [True] * 5, 1.0):
        with pytest.raises(TypeError, match="expected integers"):
            repeat(batch(), counts)  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 6)])
def test_a_range_outside_the_batch_is_rejected(start: int, stop: int) -> None:
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


def test_concatenated_splits_are_the_batch() -> None:
    parts = split(batch(), [1, 0, 3, 1])
    assert [part.num_rows for part in parts] == [1, 0, 3, 1]
    check(parts[2], [1, 2, 3])
    assert concat(parts) == batch()
    assert split(select(batch(), []), []) == []


def test_a_split_counts_rows_and_not_ranges() -> None:
    view = select(batch(), [4, 0, 1, 2, 0])
    assert decode_ints(view.groups[0].segments.counts).tolist() == [1, 3, 1]
    for part, rows in zip(split(view, [2, 2, 1]), ([4, 0], [1, 2], [0]), strict=True):
        check(part, rows)


def test_prune_drops_unused_chunks() -> None:
    view = with_column(batch([3, 0, 2, 4]), {"advantages": "float"}, chunks([9], "advantage"), range(9))
    small = prune(select(view, [8, 1, 5]))
    assert [chunk.key for chunk in small.groups[0].chunks] == ["run/1/rollout/0/0", "run/1/rollout/3/0"]
    assert pieces(small.groups[0]) == [(1, 3, 4), (0, 1, 2), (1, 0, 1)]
    assert small.groups[1] == select(view, [8, 1, 5]).groups[1]
    assert prune(small) == small
    assert prune(view).groups[0].chunks == tuple(chunks([3, 0, 2, 4])[at] for at in (0, 2, 3))


def test_ranges_that_become_adjacent_by_a_prune_are_merged() -> None:
    small = prune(select(batch([2, 1, 2]), [0, 1, 3, 4]))
    assert decode_ints(small.groups[0].segments.counts).tolist() == [4]
    assert pieces(small.groups[0]) == [(0, 0, 2), (1, 0, 2)]


def test_a_pruned_view_is_concatenated_with_an_unpruned_one() -> None:
    left = select(batch([2, 1, 2]), [4, 2, 0])
    right = prune(select(batch([2, 1, 2]), [3, 4, 1]))
    check(concat([left, right]), [4, 2, 0, 3, 4, 1])
    swapped = concat([right, left])
    assert [chunk.key for chunk in swapped.groups[0].chunks] == [f"run/1/rollout/{at}/0" for at in (0, 2, 1)]
    assert pieces(swapped.groups[0]) == [(1, 0, 2), (0, 1, 2), (1, 1, 2), (2, 0, 1), (0, 0, 1)]


def test_batches_over_different_chunks_are_concatenated() -> None:
    left, right = batch([2, 1]), batch([3])
    right = right.replace(groups=(right.groups[0].replace(chunks=tuple(chunks([3], "other"))),))
    both = concat([select(left, [2, 0]), right, slice_rows(left, 1, 2)])
    assert [chunk.key for chunk in both.groups[0].chunks] == [
        "run/1/rollout/0/0",
        "run/1/rollout/1/0",
        "run/1/other/0/0",
    ]
    assert pieces(both.groups[0]) == [(1, 0, 1), (0, 0, 1), (2, 0, 3), (0, 1, 2)]


def test_batches_with_different_column_groups_are_concatenated() -> None:
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


def test_concatenated_batches_keep_the_rows_of_every_group() -> None:
    stored = Stored([2, 3], [[4, 0, 3, 1, 2], [1, 3, 2, 4, 0]])
    parts = [
        select(stored.batch, [3, 1]),
        prune(slice_rows(stored.batch, 1, 4)),
        permute(stored.batch, [4, 2, 0, 1, 3]),
    ]
    stored.check(concat(parts), [3, 1, 1, 2, 3, 4, 2, 0, 1, 3])


def test_batches_of_different_kinds_are_not_concatenated() -> None:
    with pytest.raises(ValueError, match="no batches"):
        concat([])
    with pytest.raises(ValueError, match="different"):
        concat([batch(), batch().replace(step=2)])
    extended = with_column(batch(), {"advantages": "float"}, chunks([5], "advantage"), range(5))
    for pair in ([batch(), extended], [extended, batch()]):
        with pytest.raises(ColumnError, match="different columns"):
            concat(pair)


def test_a_column_stored_in_another_order_is_read_in_the_batchs_order() -> None:
    view = with_column(batch(), {"advantages": "float"}, chunks([2, 3], "advantage"), [3, 0, 1, 4, 2])
    assert view.columns == ("response_ids", "reward", "advantages")
    assert pieces(view.groups[1]) == [(0, 1, 2), (1, 0, 1), (1, 2, 3), (0, 0, 1), (1, 1, 2)]


@pytest.mark.parametrize(
    ("sizes", "rows", "message"),
    [
        ([5], [0, 1, 2, 3, 3], "hold row 3 2 times"),
        ([4], [0, 1, 2, 3], "hold row 4 0 times"),
        ([5], [0, 1, 2, 3, 5], "have row 5, which is not in a batch of 5"),
        ([5], [0, 1, 2, 3, -1], "have row -1"),
        ([4], [0, 1, 2, 3, 4], "5 row numbers for chunks of 4 rows"),
    ],
)
def test_a_column_covers_every_row_once(sizes: list[int], rows: list[int], message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        with_column(batch(), {"advantages": "float"}, chunks(sizes, "advantage"), rows)


def test_a_column_is_added_once() -> None:
    with pytest.raises(ColumnError, match="'reward' is already"):
        with_column(batch(), {"reward": "float"}, chunks([5], "again"), range(5))


def draw_view(data: st.DataObject, view: BatchHandle, model: list[int]) -> tuple[BatchHandle, list[int]]:
    """Any one operation on a view, and the same done to a list of its rows."""
    every = st.integers(0, max(len(model) - 1, 0))
    kind = data.draw(st.sampled_from(["select", "slice", "permute", "repeat", "filter", "concat", "split", "prune"]))
    if kind == "select":
        rows = data.draw(st.lists(every, max_size=8 if model else 0))
        return select(view, rows), [model[row] for row in rows]
    if kind == "slice":
        start = data.draw(st.integers(0, len(model)))
        stop = data.draw(st.integers(start, len(model)))
        return slice_rows(view, start, stop), model[start:stop]
    if kind == "permute":
        order = data.draw(st.permutations(range(len(model))))
        return permute(view, order), [model[row] for row in order]
    if kind == "repeat":
        counts = data.draw(st.lists(st.integers(0, 2), min_size=len(model), max_size=len(model)))
        repeated = [row for row, count in zip(model, counts, strict=True) for _ in range(count)]
        return repeat(view, counts), repeated
    if kind == "filter":
        keep = data.draw(st.lists(st.booleans(), min_size=len(model), max_size=len(model)))
        return filter_rows(view, np.array(keep, np.bool_)), [row for row, kept in zip(model, keep, strict=True) if kept]
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


@settings(deadline=None)
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


@settings(deadline=None)
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
    view = with_column(permute(batch(), order), {"advantages": "float"}, chunks([5], "advantage"), stored)
    again = data.draw(st.lists(st.integers(0, 4), max_size=6))
    assert rows_of(select(view, again).groups[1]) == [stored.index(row) for row in again]
    assert rows_of(select(view, again).groups[0]) == [order[row] for row in again]


@pytest.mark.parametrize("num_rows", [255, 256, 257, 65535, 65536, 65537])
def test_rows_at_the_limits_of_a_dtype_are_not_adjacent(num_rows: int) -> None:
    ends = batch([num_rows // 2, num_rows - num_rows // 2])
    for rows in ([num_rows - 1, 0], [num_rows - 2, num_rows - 1, 0, 1], [0, num_rows - 1]):
        check(select(ends, rows), rows)
        check(select(select(ends, np.arange(num_rows)[::-1]), rows), [num_rows - 1 - row for row in rows])


def test_few_neighbors_among_shuffled_rows_cost_nothing() -> None:
    evens = np.random.default_rng(0).permutation(np.arange(0, 2000, 2))
    rows = np.insert(evens, 500, evens[499] + 1)
    shuffled = select(batch([2000]), rows)
    check(shuffled, rows.tolist())
    assert shuffled.groups[0].segments.counts == encode_ints([1] * 1001)
    assert concat(split(shuffled, [500, 501])) == shuffled
    grouped = select(batch([2000]), (np.arange(0, 2000, 8)[::-1, None] + np.arange(8)).ravel())
    assert grouped.groups[0].segments.counts == encode_ints([8] * 250)


def test_a_million_permuted_rows_take_eight_bytes_each() -> None:
    random = np.random.default_rng(0)
    responses = np.clip(random.lognormal(6, 1, 10**6), 1, 2048).astype(np.int64)
    whole = new_batch(
        "run", 1, 0, chunks([125_000] * 8), {"reward": "float"}, random.integers(32, 257, 10**6), responses
    )
    order = random.permutation(10**6)
    view = permute(whole, order)
    assert len(view.model_dump_json()) < 8.01 * 10**6  # as base64: 3 bytes of row, 1 of prompt, 2 of response length
    assert len(view.groups[0].model_dump_json()) - len(whole.groups[0].model_dump_json()) < 4.001 * 10**6
    assert np.array_equal(decode_ints(view.response_lengths), responses[order])
    plan = read_plan(view.groups[0])
    assert np.array_equal(plan.chunk * 125_000 + plan.start, order)
    assert np.array_equal(plan.stop, plan.start + 1)
    assert permute(view, np.argsort(order)) == whole


@pytest.mark.parametrize("num_rows", [10, 10**6])
def test_ranges_of_rows_take_constant_size(num_rows: int) -> None:
    whole = batch([num_rows])
    for view in (whole, slice_rows(whole, 1, num_rows - 1), *split(whole, [3, num_rows - 3]), prune(whole)):
        assert len(view.groups[0].segments.model_dump_json()) < 150


def test_a_handle_with_nonexistent_rows_is_rejected() -> None:
    group = batch().groups[0]
    for start in (4, 5, 6):
        with pytest.raises(ValueError, match=f"segments end at row {start + 2} of chunks of 5 rows"):
            read_plan(group.replace(segments=Segments(starts=encode_ints([start]), counts=encode_ints([2]))))
    with pytest.raises(ValueError, match=r"it has 9 rows, but lengths and segments of \[5\] rows"):
        select(batch().replace(num_rows=9), [8])
    short = group.replace(segments=Segments(starts=encode_ints([0]), counts=encode_ints([2])))
    with pytest.raises(ValueError, match=r"it has 5 rows, but lengths and segments of \[2, 5\] rows"):
        select(batch().replace(groups=(short,)), [4])
