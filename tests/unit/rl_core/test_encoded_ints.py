"""The encoding of integers in handles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.views import (
    decode_ints,
    encode_ints,
)
from schemas.batch import EncodedInts


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
