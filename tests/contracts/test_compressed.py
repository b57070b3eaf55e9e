"""Compressed files: the same rows and handles, fewer bytes."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from infra.stores.chunk_index import MemoryStore
from infra.stores.files import FsspecColumnStore
from infra.stores.tiered import TieredColumnStore
from rl_core.columns.codec import Compression
from rl_core.columns.jagged import jagged
from rl_core.views import select
from schemas.batch import BatchHandle
from schemas.errors import ChunkCorruptedError, DuplicateChunkError
from tests.contracts.backends import COLUMNS, data_file, put_batch, rollout_columns

RUN = "compressed"
LENGTHS = [2, 30, 3000]


def certain_rows(seed: int = 0) -> pa.RecordBatch:
    """Rows of tokens without an alternative: most values are random, but not their log-probs."""
    columns = rollout_columns(LENGTHS, seed)
    at = columns.schema.names.index("sampler_logprobs")
    return columns.set_column(at, "sampler_logprobs", jagged(np.zeros(sum(LENGTHS), np.float32), np.array(LENGTHS)))


@pytest.fixture(params=["lz4", "zstd"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FsspecColumnStore:
    made = FsspecColumnStore(RUN, str(tmp_path / "columns"), compression=request.param)
    made.open(1)
    return made


@pytest.fixture
def batch(store: FsspecColumnStore) -> BatchHandle:
    return put_batch(store, 1, [certain_rows(), certain_rows(seed=1)])


def test_rows_and_handles_are_those_of_uncompressed_files(
    store: FsspecColumnStore, batch: BatchHandle, tmp_path: Path
) -> None:
    plain = FsspecColumnStore(RUN, str(tmp_path / "plain"))
    plain.open(1)
    expected = put_batch(plain, 1, [certain_rows(), certain_rows(seed=1)])
    assert store.read(batch, COLUMNS).equals(plain.read(expected, COLUMNS))
    view = [4, 0, 2]
    assert store.read(select(batch, view), COLUMNS).equals(plain.read(select(expected, view), COLUMNS))
    assert [ref.num_bytes for ref in batch.chunks] == [ref.num_bytes for ref in expected.chunks]
    assert store.bytes_by_step()[1] < 0.95 * plain.bytes_by_step()[1]
    store.verify(batch)
    another = FsspecColumnStore(RUN, str(tmp_path / "columns"), read_only=True)  # knows nothing of the compression
    assert another.read(batch, ["reward"]).num_rows == 6


def test_damage_is_detected(store: FsspecColumnStore, batch: BatchHandle) -> None:
    path = data_file(store, batch.chunks[0])
    data = path.read_bytes()
    for at in range(0, len(data), 997):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ChunkCorruptedError, match=r"the checksum of bytes 0 to \d+"):
            store.read(batch, ["reward"])
    path.write_bytes(data)
    os.truncate(path, len(data) - 1)
    with pytest.raises(ChunkCorruptedError, match=f"{len(data) - 1} bytes are stored, expected {len(data)}"):
        store.verify(batch)


def test_the_same_put_again_is_none(store: FsspecColumnStore, batch: BatchHandle) -> None:
    again = put_batch(store, 1, [certain_rows()])
    assert again.chunks[0] == batch.chunks[0]
    with pytest.raises(DuplicateChunkError):
        put_batch(store, 1, [certain_rows(seed=2)])


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_behind_a_front_store_the_references_are_the_same(compression: Compression, tmp_path: Path) -> None:
    durable = FsspecColumnStore(RUN, str(tmp_path / "columns"), compression=compression)
    tiered = TieredColumnStore(MemoryStore(RUN, 2**24, durable.incarnation), durable)
    tiered.open(1)
    batch = put_batch(tiered, 1, [certain_rows()])
    tiered.flush()
    rows = tiered.read(batch, COLUMNS)
    tiered.front.clear(1)
    assert tiered.read(batch, COLUMNS).equals(rows)
    tiered.verify(batch)


def test_other_tools_open_the_files(store: FsspecColumnStore, batch: BatchHandle) -> None:
    with pa.memory_map(str(data_file(store, batch.chunks[0]))) as file:
        table = pa.ipc.open_file(file).read_all()
    assert np.array_equal(table["response_ids"].combine_chunks().value_lengths(), LENGTHS)
