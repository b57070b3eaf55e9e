"""Views of batch handles: selection, repetition, splits, added columns, and their sizes."""

import numpy as np
import pytest

from rl_core.views import concat, decode_ints, encode_ints, new_batch, read_plan, select, split, with_column
from schemas.batch import Segments
from schemas.errors import ColumnError
from tests.unit.rl_core.stored_batches import batch, check, chunks, pieces, prune


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
    assert split(view, [0, 0]) == [view, view]
    assert prune(view).groups[0].chunks == ()
    assert prune(view).groups[0].dtypes == view.groups[0].dtypes
    assert with_column(prune(view), {"advantages": "float"}, [], []).columns == (*view.columns, "advantages")


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_outside_the_batch_is_rejected(row: int) -> None:
    views = [
        batch(),
        select(select(batch(), np.repeat(range(5), 2)), [0, 9, 3, 4, 5]),
        select(batch([4, 5]), range(2, 7)),
        split(batch([2, 6]), [1, 5, 2])[1],
        prune(select(batch([3, 3]), [0, 1, 2, 3, 5])),
        concat(split(batch(), [2, 3])),
    ]
    for view in views:
        with pytest.raises(IndexError, match=f"row {row} is not in a batch of 5 rows"):
            select(view, [0, row])


def test_a_mask_is_not_a_selection() -> None:
    with pytest.raises(TypeError, match="bool"):
        select(batch(), np.array([True, False, True, False, False]))


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
    view = select(whole, order)
    assert len(view.model_dump_json()) < 8.01 * 10**6  # as base64: 3 bytes of row, 1 of prompt, 2 of response length
    assert len(view.groups[0].model_dump_json()) - len(whole.groups[0].model_dump_json()) < 4.001 * 10**6
    assert np.array_equal(decode_ints(view.response_lengths), responses[order])
    plan = read_plan(view.groups[0])
    assert np.array_equal(plan.chunk * 125_000 + plan.start, order)
    assert np.array_equal(plan.stop, plan.start + 1)
    assert select(view, np.argsort(order)) == whole


@pytest.mark.parametrize("num_rows", [10, 10**6])
def test_ranges_of_rows_take_constant_size(num_rows: int) -> None:
    whole = batch([num_rows])
    for view in (whole, select(whole, range(1, num_rows - 1)), *split(whole, [3, num_rows - 3]), prune(whole)):
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
