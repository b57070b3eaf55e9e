"""The encoding of chunks, and their validation against the catalog."""

import pickle
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.columns.codec import arrow_type, decode, encode, validate, value_dtypes
from rl_core.columns.jagged import jagged
from schemas.errors import ColumnError, StoreError


def batch(lengths: Sequence[int] = (2, 0, 3)) -> pa.RecordBatch:
    num_values = sum(lengths)
    counts = np.array(lengths, dtype=np.int64)
    return pa.record_batch(
        {
            "response_ids": jagged(np.arange(num_values, dtype=np.uint16), counts),
            "loss_mask": jagged(np.arange(num_values) % 2 == 0, counts),
            "sampler_logprobs": jagged(-np.arange(num_values, dtype=np.float32), counts),
            "reward": pa.array([None if n == 0 else float(n) for n in lengths], pa.float32()),
            "response_text": pa.array(["é" * n for n in lengths], pa.string()),
        }
    )


@given(st.lists(st.integers(0, 4)), st.data())
def test_any_slice_of_a_batch_survives_a_round_trip(lengths: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(lengths)))
    stop = data.draw(st.integers(start, len(lengths)))
    part = batch(lengths).slice(start, stop - start)
    validate(part)
    decoded = decode(encode(part))
    assert decoded.equals(part)
    assert decoded.schema.equals(part.schema)


def test_decoding_maps_the_buffer() -> None:
    data = encode(batch())
    address = decode(data).column("sampler_logprobs").values.buffers()[1].address
    assert data.address <= address < data.address + data.size


def test_a_slice_is_encoded_without_other_rows() -> None:
    whole = batch([1000, 1])
    assert encode(whole.slice(1)).size < encode(whole).size / 4


def test_encoding_holds_no_pickle_and_no_foreign_metadata() -> None:
    data = encode(batch().replace_schema_metadata({"pandas": "{}"})).to_pybytes()
    assert data[:6] == data[-6:] == b"ARROW1"  # an Arrow file; a pickle starts with 0x80
    assert b"pandas" not in data


def test_every_truncation_is_rejected() -> None:
    data = encode(batch()).to_pybytes()
    for size in range(len(data)):
        with pytest.raises(StoreError):
            decode(data[:size])


def test_foreign_bytes_are_rejected() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch().schema) as writer:
        writer.write_batch(batch())
        writer.write_batch(batch())
    for data in (b"", b"\x00" * 64, pickle.dumps(batch()), sink.getvalue().to_pybytes()):
        with pytest.raises(StoreError):
            decode(data)


@given(st.data())
def test_damaged_bytes_raise_or_decode_to_a_batch_within_its_memory(data: st.DataObject) -> None:
    damaged = bytearray(encode(batch()).to_pybytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(bytes(damaged))
    except StoreError:
        return
    expected = batch().schema
    for field, column in zip(decoded.schema, decoded.columns, strict=True):
        if field not in expected:
            continue  # a store rejects other names and types
        if pa.types.is_string(column.type):
            column = column.cast(pa.binary())  # checksums, not decoding, detect invalid UTF-8
        column.validate(full=True)


def test_offsets_out_of_bounds_are_rejected() -> None:
    data = bytearray(encode(pa.record_batch({"prompt_ids": jagged(np.arange(7, dtype=np.int32), np.array([3, 4]))})))
    at = bytes(data).index(np.array([0, 3, 7], dtype="<i8").tobytes())
    data[at + 8 : at + 16] = np.array([10**9], dtype="<i8").tobytes()
    with pytest.raises(StoreError, match=r"damaged.*'prompt_ids' point outside its 7 values"):
        decode(bytes(data))


def test_string_offsets_out_of_bounds_are_rejected() -> None:
    data = bytearray(encode(pa.record_batch({"answer": pa.array(["abc", "defg"])})))
    at = bytes(data).index(np.array([0, 3, 7], dtype="<i4").tobytes())
    for wrong in (10**6, 2**31 - 1, -1):
        data[at + 4 : at + 8] = np.array([wrong], dtype="<i4").tobytes()
        with pytest.raises(StoreError, match="'answer' point outside its"):
            decode(bytes(data))


def test_value_dtypes_have_the_notation_of_handles() -> None:
    assert value_dtypes(batch()) == {
        "response_ids": "uint16",
        "loss_mask": "bool",
        "sampler_logprobs": "float",
        "reward": "float",
        "response_text": "string",
    }
    for name, dtype in value_dtypes(batch()).items():
        assert arrow_type(name, dtype) == batch().column(name).type
    with pytest.raises(ColumnError, match="'advantages' is double, expected float"):
        arrow_type("advantages", "double")


def floats(dtype: str, lengths: Sequence[int] = (1, 2)) -> pa.LargeListArray:
    return jagged(np.zeros(sum(lengths), dtype=dtype), np.array(lengths))


NULL_INSIDE = pa.array([[1.0], [None, 2.0]], pa.large_list(pa.float32()))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"color": pa.array([1])}, "'color' is not in the catalog"),
        ({"advantages": pa.array([1.0])}, "'advantages' is double, expected float"),
        (
            {"behavior_logprobs": floats("float64")},
            "large_list<item: double>, expected large_list<item: float>",
        ),
        ({"behavior_logprobs": pa.array([1.0], pa.float32())}, "is float, expected large_list<item: float>"),
        ({"advantages": floats("float32")}, "is large_list<item: float>, expected float"),
        ({"prompt_ids": pa.array([[1]], pa.list_(pa.int32()))}, "is list<item: int32>"),
        ({"sample_id": pa.array(["a", None])}, "'sample_id' is null in row 1"),
        ({"loss_mask": pa.array([[True], None], pa.large_list(pa.bool_()))}, "'loss_mask' is null in row 1"),
        ({"behavior_logprobs": NULL_INSIDE}, "1 null values inside"),
        (
            {"sampler_logprobs": floats("float32"), "behavior_logprobs": floats("float32", (2, 1))},
            "'behavior_logprobs' has 2 values in row 0, expected 1",
        ),
    ],
)
def test_a_column_that_is_not_as_declared_is_rejected(columns: dict[str, pa.Array], message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        validate(pa.record_batch(columns))


def test_a_batch_has_columns_with_distinct_names() -> None:
    with pytest.raises(ColumnError, match="no columns"):
        validate(pa.record_batch([], names=[]))
    reward = pa.array([1.0], pa.float32())
    with pytest.raises(ColumnError, match="repeat: reward"):
        validate(pa.RecordBatch.from_arrays([reward, reward], names=["reward", "reward"]))


def test_row_lengths_must_equal_known_ones() -> None:
    columns = pa.record_batch({"behavior_logprobs": floats("float32", (2, 1))})
    validate(columns, {"response": np.array([2, 1])})
    with pytest.raises(ColumnError, match="has 1 values in row 1, expected 3"):
        validate(columns, {"response": np.array([2, 3])})


def test_a_reward_part_may_be_null() -> None:
    validate(pa.record_batch({"reward_format": pa.array([None, 1.0], pa.float32())}))
