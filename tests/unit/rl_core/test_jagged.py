"""Jagged columns: building them, and their values, offsets, lengths and tensors."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.columns.jagged import as_tensor, flat_values, jagged, offsets, row_lengths, token_dtype
from schemas.errors import ColumnError

ROWS = [[1, 2, 3], [], [4], [5, 6]]


def column(dtype: str = "int32") -> pa.LargeListArray:
    return jagged([np.array(row, dtype=dtype) for row in ROWS])


def test_rows_and_flat_values_build_the_same_column() -> None:
    flat = jagged(np.array([1, 2, 3, 4, 5, 6], dtype=np.int32), np.array([3, 0, 1, 2]))
    assert flat.type == pa.large_list(pa.int32())
    assert flat.to_pylist() == ROWS
    assert flat.equals(column())


def test_a_slice_has_its_own_values_offsets_and_lengths() -> None:
    part = column().slice(1, 3)
    assert flat_values(part).tolist() == [4, 5, 6]
    assert offsets(part).tolist() == [0, 0, 1, 3]
    assert row_lengths(part).tolist() == [0, 1, 2]
    assert as_tensor(part).tolist() == [4, 5, 6]


def test_uniform_lengths_stay_jagged() -> None:
    uniform = jagged([np.zeros(2, np.float32)] * 3)
    assert uniform.type == pa.large_list(pa.float32())
    assert flat_values(uniform).shape == (6,)


def test_no_rows_and_only_empty_rows_keep_their_dtype() -> None:
    none = jagged(np.empty(0, np.uint16), np.empty(0, np.int64))
    empty = jagged(np.empty(0, np.uint16), np.zeros(3, np.int64))
    assert (len(none), len(empty)) == (0, 3)
    assert none.type == empty.type == pa.large_list(pa.uint16())
    assert flat_values(none).dtype == np.uint16
    assert offsets(none).tolist() == [0]
    assert as_tensor(empty).dtype == torch.int32


def test_bool_survives_a_slice_that_starts_within_a_byte() -> None:
    mask = jagged(np.array([1, 0, 1, 1, 0, 1], dtype=bool), np.array([1, 4, 1]))
    assert flat_values(mask.slice(1)).tolist() == [False, True, True, False, True]
    assert as_tensor(mask.slice(1)).tolist() == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("int32", torch.int32), ("float32", torch.float32), ("uint16", torch.int32), ("bool", torch.bool)],
)
def test_tensors_have_the_dtypes_that_torch_computes_with(dtype: str, expected: torch.dtype) -> None:
    assert as_tensor(column(dtype)).dtype == expected


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_tensors_share_the_columns_memory(dtype: str) -> None:
    stored = column(dtype)
    assert as_tensor(stored.slice(2)).data_ptr() == stored.values.buffers()[1].address + 3 * 4


def test_views_are_read_only_and_copies_do_not_change_the_column() -> None:
    ids = column("uint16")
    with pytest.raises(ValueError, match="read-only"):
        flat_values(ids)[0] = 9
    as_tensor(ids)[0] = 9
    assert ids.to_pylist() == ROWS


def test_a_null_float_is_nan_and_other_nulls_are_rejected() -> None:
    values = as_tensor(pa.array([1.5, None], pa.float32()))
    assert values[0] == 1.5
    assert values[1].isnan()
    with pytest.raises(ColumnError, match="1 nulls"):
        flat_values(pa.array([1, None], pa.int32()))


def test_strings_have_values_but_no_tensor() -> None:
    assert flat_values(pa.array(["a", "é"])).tolist() == ["a", "é"]
    with pytest.raises(ColumnError, match="a string column"):
        as_tensor(pa.array(["a"]))


def test_a_row_column_has_no_offsets() -> None:
    with pytest.raises(ColumnError, match="no row offsets"):
        row_lengths(pa.array([1.0], pa.float32()))


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        (np.zeros(3), [1, 1], "add up to 2 values, but there are 3"),
        (np.zeros(3), [4, -1], "non-negative"),
        (np.zeros(3), [1.0, 2.0], "integers"),
        (np.zeros((2, 2, 2)), [1, 1], "1-D"),
        (np.zeros(3), None, "need the lengths"),
        ([np.zeros(3)], [3], "already known"),
        ([], None, "no dtype"),
        ([np.zeros(1, np.int32), np.zeros(1, np.int64)], None, "row 1 is int64"),
        ([np.zeros((1, 1))], None, "row 0"),
    ],
)
def test_inconsistent_values_and_lengths_are_rejected(values: object, lengths: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jagged(values, None if lengths is None else np.array(lengths))  # type: ignore[arg-type]


def test_token_dtype_is_the_narrowest_that_holds_every_id() -> None:
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.int32
    for size in (0, 2**31 + 1):
        with pytest.raises(ValueError, match="vocab_size"):
            token_dtype(size)


@given(st.lists(st.lists(st.integers(0, 65535), max_size=5), min_size=1), st.data())
def test_any_slice_returns_its_rows(rows: list[list[int]], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    part = jagged([np.array(row, dtype=np.uint16) for row in rows]).slice(start, stop - start)
    assert row_lengths(part).tolist() == [len(row) for row in rows[start:stop]]
    values, bounds = flat_values(part).tolist(), offsets(part).tolist()
    assert [values[first:last] for first, last in pairwise(bounds)] == rows[start:stop]
    assert bounds[-1] == len(values)
