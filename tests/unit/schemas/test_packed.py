"""Packed numbers: sequences of Python's numbers, arrays to numpy, and short in JSON and pickles."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from schemas.packed import PackedFloats, PackedInts

INTS, FLOATS = TypeAdapter(PackedInts), TypeAdapter(PackedFloats)


def again(packed: Any) -> Any:
    return pickle.loads(pickle.dumps(packed))  # noqa: S301  made here


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_integers_survive(values: list[int]) -> None:
    packed = INTS.validate_python(values)
    assert packed == values
    assert list(packed) == [packed[at] for at in range(len(values))] == values
    assert np.asarray(packed).tolist() == values
    assert INTS.validate_json(INTS.dump_json(packed)) == again(packed) == packed


@given(st.lists(st.none() | st.floats(allow_nan=False)))
def test_floats_survive_and_none_is_nan_to_numpy(values: list[float | None]) -> None:
    packed = FLOATS.validate_python(values)
    assert packed == values
    assert FLOATS.validate_json(FLOATS.dump_json(packed)) == again(packed) == packed
    assert packed.count(None) == np.isnan(np.asarray(packed)).sum() == values.count(None)
    assert packed.present == [value for value in values if value is not None]


@given(st.lists(st.lists(st.sampled_from([0, 255, 256, 65_535, 65_536, -1]))))
def test_parts_of_different_widths_are_concatenated(parts: list[list[int]]) -> None:
    assert PackedInts.concat(map(PackedInts, parts)) == [value for part in parts for value in part]
    assert PackedFloats.concat(PackedFloats([value / 10 for value in part]) for part in parts) == [
        value / 10 for part in parts for value in part
    ]


def test_the_narrowest_type_is_used() -> None:
    widths = [np.asarray(PackedInts([0, high])).dtype.itemsize for high in (255, 256, 65_535, 65_536)]
    assert widths == [1, 2, 2, 4]
    assert [np.asarray(PackedFloats([1.0, None, value])).dtype.itemsize for value in (0.5, 0.1, 1e300)] == [4, 8, 8]
    assert INTS.dump_json(PackedInts([1, 2, 3])) == b'"BAQID"'


def test_a_sequence_reads_like_a_tuple() -> None:
    packed = PackedFloats([1, None, 0.5])
    assert repr(packed) == "(1.0, None, 0.5)"
    assert packed[-1] == 0.5
    assert packed[1] is None
    assert packed[:2] == (1.0, None)
    assert packed != (1.0, None)
    assert packed != 3
    assert hash(packed) == hash(PackedFloats((1, None, 0.5)))
    with pytest.raises(IndexError):
        packed[3]


def test_what_reads_a_packed_array_can_not_change_it() -> None:
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(PackedInts([1]))[0] = 2


@pytest.mark.parametrize("values", [[2**31], ["a"], [None], [1.5], 3, "B?", "Bx", "", "qAAAA", "iAAAA"])
def test_what_can_not_be_packed_is_rejected(values: object) -> None:
    with pytest.raises(ValidationError, match="packed"):
        INTS.validate_python(values)
