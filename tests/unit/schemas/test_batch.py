"""Chunk keys, catalog entries, encoded integers, segments, and the traffic with the store."""

from functools import reduce
from operator import add

import pytest
from pydantic import ValidationError

from schemas.batch import ChunkKey, EncodedInts, Segments, StoreTraffic
from schemas.catalog import CATALOG, column_spec
from schemas.errors import ColumnError


@pytest.mark.parametrize("name", ["../escape", "a/b", "", ".hidden", "a b", "a\n"])
def test_an_unsafe_key_part_is_rejected(name: str) -> None:
    with pytest.raises(ValidationError, match="not a safe name"):
        ChunkKey(run_id=name, step=0, stage="rollout")
    with pytest.raises(ValidationError, match="not a safe name"):
        ChunkKey(run_id="run", step=0, stage=name)


def test_a_key_is_deterministic() -> None:
    assert str(ChunkKey(run_id="run-1", step=7, stage="rollout", shard=2)) == "run-1/7/rollout/2/0"


def test_reward_parts_share_the_entry_of_reward() -> None:
    assert column_spec("reward_format").dtypes == CATALOG["reward"].dtypes
    with pytest.raises(ColumnError, match="'rewards' is not in the catalog"):
        column_spec("rewards")
    with pytest.raises(ColumnError):
        column_spec("reward_")


def test_encoded_integers_are_narrower_in_json_than_in_memory() -> None:
    packed = EncodedInts.model_validate_json('{"size": 3, "base": 7, "dtype": "u3", "data": "AQAAAgAAAwAB"}')
    assert packed.data == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 1, 0])
    assert packed.model_dump() == {"size": 3, "base": 7, "dtype": "u3", "data": "AQAAAgAAAwAB"}
    assert EncodedInts.model_validate(packed.model_dump()) == packed
    assert packed.replace(base=8).data == packed.data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("AQAAAgAA", "6 bytes don't hold 3 integers of 3 bytes"),
        ("AQAAAgAAAwABAA==", "10 bytes don't hold 3 integers of 3 bytes"),
        (bytes(9), "9 bytes don't hold 3 integers of 4 bytes"),
        ("AQAAAgAAAwA", "not base64"),
        ("AQAAAgAAAw*B", "not base64"),
        ("AQAAAgAAAwAB\n", "not base64"),
        ("AQAAAgAAAwAé", "not base64"),
        (bytearray(12), "valid bytes"),
        (None, "valid bytes"),
    ],
)
def test_malformed_encoded_integers_are_rejected(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncodedInts(size=3, base=0, dtype="u3", data=data)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"base": -1}, {"base": 2**63}, {"size": -1}, {"dtype": "u9"}, {"dtype": "i4"}])
def test_encoded_integers_are_non_negative_and_fit_in_int64(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(change))):
        EncodedInts.model_validate({"size": 0, "base": 0, "dtype": "u1", "data": "", **change})


def test_segments_have_one_count_per_start() -> None:
    one, two = (EncodedInts(size=size, base=1, dtype="u1", data=b"") for size in (1, 2))
    with pytest.raises(ValueError, match="1 starts and 2 counts"):
        Segments(starts=one, counts=two)


def test_the_traffic_of_several_processes_is_added_up() -> None:
    parts = [StoreTraffic(num_puts=at, put_seconds=0.1 * at, read_bytes=2**40) for at in range(4)]
    assert StoreTraffic.total(parts) == reduce(add, parts)
    assert StoreTraffic.total(parts).num_puts == 6
    assert StoreTraffic.total([]) == StoreTraffic()
