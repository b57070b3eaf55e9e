"""Masks as run lengths, and padded values as jagged columns and back."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rl_core.columns.jagged import flat_values, jagged, row_lengths
from rl_core.padded.nesting import RunLengths, as_mask, cast_exactly, from_padded, to_padded_at
from schemas.errors import ColumnError
from tests.unit.rl_core.padded_batches import runs_of


def to_padded(column: pa.LargeListArray, *, width: int, pad: float, side: str = "right") -> torch.Tensor:
    """Pad a jagged column of B rows to the given width, [B, S]."""
    return to_padded_at(column, runs_of(row_lengths(column), width, side), pad)


# Padded on the left, on the right, on both sides, with holes, empty, full.
MASK = np.array(
    [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=bool
)
masks = hnp.arrays(np.bool_, hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9))


def test_runs_of_a_mask_by_hand() -> None:
    runs = RunLengths.from_mask(MASK)
    assert runs.num_runs.tolist() == [1, 1, 1, 3, 0, 1]
    assert runs.starts.tolist() == [2, 0, 1, 0, 2, 4, 0]
    assert runs.stops.tolist() == [5, 2, 4, 1, 3, 5, 5]
    assert runs.lengths.tolist() == [3, 2, 3, 3, 0, 5]
    assert (runs.num_rows, runs.width) == (6, 5)
    assert runs.num_bytes == 6 + 7 + 7
    assert np.array_equal(runs.to_mask(), MASK)


@pytest.mark.parametrize(("width", "dtype"), [(0, np.uint8), (255, np.uint8), (256, np.uint16), (70000, np.uint32)])
def test_runs_take_the_narrowest_integers_that_hold_the_width(width: int, dtype: type) -> None:
    full = np.ones((2, width), dtype=bool)
    runs = RunLengths.from_mask(full)
    assert runs.num_runs.dtype == runs.starts.dtype == runs.stops.dtype == dtype
    assert runs.lengths.tolist() == [width, width]
    assert np.array_equal(runs.to_mask(), full)


@given(masks)
def test_any_mask_survives_a_round_trip(mask: np.ndarray) -> None:
    for given_mask in (mask, np.asfortranarray(mask), torch.from_numpy(mask), torch.from_numpy(mask).long()):
        runs = RunLengths.from_mask(given_mask)
        assert np.array_equal(runs.to_mask(), mask)
    assert np.array_equal(runs.lengths, mask.sum(axis=1))
    assert np.array_equal(runs.positions(), np.flatnonzero(mask))
    assert runs.starts.size == runs.stops.size == runs.num_runs.sum(dtype=int)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.array([[0, 2]]), "values from 0 to 2, expected 0 and 1"),
        (np.array([[0, -1]]), "values from -1 to 0"),
        (np.array([1, 0]), r"int64\[2\], expected bool or 0/1 integers of shape \[B, S\]"),
        (torch.ones(1, 2), r"float32\[1, 2\]"),
    ],
)
def test_other_arrays_are_rejected_as_masks(mask: np.ndarray | torch.Tensor, message: str) -> None:
    for function in (as_mask, RunLengths.from_mask, lambda m: from_padded(np.zeros((1, 2), bool), m)):
        with pytest.raises(ColumnError, match=message):
            function(mask)


def padded_values(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    values = np.arange(1, np.prod(shape) + 1).reshape(shape)
    return (values % 3 == 0 if dtype == "bool" else values).astype(dtype)


@pytest.mark.parametrize("dtype", ["bool", "uint16", "int32", "float32"])
@pytest.mark.parametrize("as_torch", [False, True])
def test_every_dtype_keeps_exactly_the_existing_values(dtype: str, as_torch: bool) -> None:
    values = padded_values(dtype, MASK.shape)
    column = from_padded(torch.from_numpy(values) if as_torch else values, MASK)
    assert column.type == pa.large_list(pa.from_numpy_dtype(dtype))
    assert column.to_pylist() == [row[mask].tolist() for row, mask in zip(values, MASK, strict=True)]
    back = to_padded_at(column, RunLengths.from_mask(MASK), pad=1)
    assert back.shape == MASK.shape
    assert back.numpy().tolist() == np.where(MASK, values, 1).tolist()


def test_values_around_a_hole_keep_their_positions() -> None:
    column = from_padded(np.array([[5, 6, 7, 8]], np.int32), np.array([[1, 0, 1, 0]]))
    assert column.to_pylist() == [[5, 7]]
    runs = RunLengths.from_mask(np.array([[1, 0, 1, 0]]))
    assert to_padded_at(column, runs, pad=-1).tolist() == [[5, -1, 7, -1]]
    assert to_padded(column, width=4, pad=-1).tolist() == [[5, 7, -1, -1]]


def test_bool_is_stored_in_bits() -> None:
    column = from_padded(np.ones((8, 100), bool), np.ones((8, 100), bool))
    assert column.flatten().nbytes == 100


@given(masks, st.sampled_from(["bool", "uint16", "int32", "float32"]), st.data())
def test_any_existing_values_survive_a_round_trip(mask: np.ndarray, dtype: str, data: st.DataObject) -> None:
    values = data.draw(hnp.arrays(dtype, mask.shape))
    column = from_padded(values, mask)
    assert row_lengths(column).tolist() == mask.sum(axis=1).tolist()
    back = to_padded_at(column, RunLengths.from_mask(mask), pad=0).numpy()
    np.testing.assert_array_equal(back, np.where(mask, values, np.zeros((), dtype)))


@given(st.lists(st.integers(0, 6)), st.integers(0, 3), st.sampled_from(["left", "right"]), st.data())
def test_rows_padded_on_either_side_survive_a_round_trip(
    lengths: list[int], spare: int, side: str, data: st.DataObject
) -> None:
    counts = np.array(lengths, dtype=np.int64)
    column = jagged(np.arange(counts.sum(), dtype=np.int32), counts)
    start = data.draw(st.integers(0, len(lengths)))
    part, width = column.slice(start), max(lengths, default=0) + spare
    padded = to_padded(part, width=width, pad=-1, side=side)
    assert padded.shape == (len(part), width)
    assert from_padded(padded, padded >= 0).equals(part)
    from_its_side = padded.flip(1) if side == "left" else padded
    assert (from_its_side >= 0).int().diff(dim=1).le(0).all()


def test_the_padded_width_does_not_depend_on_the_longest_row() -> None:
    column = jagged(np.array([1, 2, 3], np.uint16), np.array([1, 2]))
    padded = to_padded(column, width=4, pad=70000, side="left")
    assert padded.dtype == torch.int32
    assert padded.tolist() == [[70000, 70000, 70000, 1], [70000, 70000, 2, 3]]
    padded[0, 0] = 9
    assert column.to_pylist() == [[1], [2, 3]]


def test_rows_that_disagree_with_the_mask_are_named() -> None:
    column, runs = jagged(np.zeros(3, np.float32), np.array([1, 2])), RunLengths.from_mask(np.ones((2, 2), bool))
    with pytest.raises(ColumnError, match="row 0 has 1 values, expected 2"):
        to_padded_at(column, runs, pad=0)
    with pytest.raises(ColumnError, match="has 1 rows, expected 2"):
        to_padded_at(column.slice(1), runs, pad=0)
    with pytest.raises(ColumnError, match="no row offsets"):
        to_padded(pa.array([1.0]), width=2, pad=0)


@pytest.mark.parametrize(
    ("dtype", "pad"), [("int32", 0.5), ("int32", float("nan")), ("uint16", 2**40), ("bool", 2), ("bool", -1)]
)
def test_a_pad_that_the_dtype_can_not_hold_is_rejected(dtype: str, pad: float) -> None:
    with pytest.raises(ValueError, match=f"can't be padded with {pad}"):
        to_padded(jagged(np.zeros(1, dtype), np.array([1])), width=2, pad=pad)
    assert to_padded(jagged(np.zeros(1, "float32"), np.array([1])), width=2, pad=float("nan")).isnan().sum() == 1


IDS = np.array([[-100, 3, 70000], [2, -100, 65535]])
EXISTS = np.array([[0, 1, 0], [1, 0, 1]], bool)


def test_wide_ids_need_a_narrow_dtype_that_holds_the_existing_ones() -> None:
    with pytest.raises(ColumnError, match="can't be int64, expected bool, uint16, int32, float32: pass one as dtype"):
        from_padded(torch.from_numpy(IDS), EXISTS)
    column = from_padded(torch.from_numpy(IDS), EXISTS, dtype=np.uint16)
    assert column.type == pa.large_list(pa.uint16())
    assert column.to_pylist() == [[3], [2, 65535]]
    with pytest.raises(ColumnError, match="2 of 5 int64 values don't fit uint16 exactly, the first is 70000"):
        from_padded(IDS, np.array([[0, 1, 1], [1, 1, 1]]), dtype=np.uint16)
    with pytest.raises(ColumnError, match="can't be int8"):
        from_padded(IDS, EXISTS, dtype=np.int8)


def test_values_have_the_shape_of_their_mask() -> None:
    with pytest.raises(ColumnError, match=r"shape \[2, 3\], expected \[2, 2\]"):
        from_padded(IDS, EXISTS[:, :2], dtype=np.int32)


@pytest.mark.parametrize(
    ("value", "dtype", "fits"),
    [
        (np.int64(1), "bool", True),
        (np.int64(2), "bool", False),
        (np.int64(-1), "uint16", False),
        (np.int64(2**31), "int32", False),
        (np.uint64(2**64 - 1), "int32", False),
        (np.uint32(2**32 - 1), "int32", False),
        (np.float16(0.1), "float32", True),
        (np.float64(0.5), "float32", True),
        (np.float64(0.1), "float32", False),
        (np.float64(1e300), "float32", False),
        (np.float64(np.inf), "float32", True),
        (np.float64(np.nan), "float32", True),
        (np.float32(np.nan), "int32", False),
        (np.float32(0.5), "int32", False),
        (np.int64(2**24 + 1), "float32", False),
        (np.bool_(True), "float32", True),
    ],
)
def test_a_value_is_kept_exactly_or_rejected(value: np.generic, dtype: str, fits: bool) -> None:
    values = np.array([value])
    if fits:
        cast = cast_exactly(values, dtype)
        assert cast.dtype == dtype
        np.testing.assert_array_equal(cast.astype(values.dtype), values)
    else:
        with pytest.raises(ColumnError, match=r"1 of 1 .* exactly"):
            cast_exactly(values, dtype)


def test_bfloat16_becomes_float32() -> None:
    values = torch.tensor([[-1.25, 0.1]], dtype=torch.bfloat16)
    column = from_padded(values, torch.ones(1, 2, dtype=torch.bool))
    assert flat_values(column).tolist() == values[0].float().tolist()


def test_a_nested_tensor_is_rejected() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)
    with pytest.raises(ColumnError, match="already nested"):
        from_padded(nested, np.ones((2, 2), bool))
