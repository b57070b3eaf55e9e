"""The durable tier: columns outlive the front, and nothing is committed before it is durable."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from infra.stores.chunk_index import MemoryStore
from infra.stores.files import FsspecColumnStore
from infra.stores.shared.index import start_shared_store
from infra.stores.shared.node_files import Limits
from infra.stores.tiered import TieredColumnStore
from rl_core.views import select
from schemas.batch import ChunkKey, ChunkRef
from schemas.errors import ChunkCorruptedError, ChunkNotFoundError, StoreError
from tests.contracts.backends import CAPACITY, COLUMNS, data_file, key, put_batch, rollout_columns
from tests.support.progress import wait_until

RUN = "tiers"


@pytest.fixture
def durable(tmp_path: Path) -> FsspecColumnStore:
    return FsspecColumnStore(RUN, str(tmp_path / "columns"))


def fresh(durable: FsspecColumnStore) -> TieredColumnStore:
    """Return the store with an empty front, as after the loss of everything in memory."""
    return TieredColumnStore(MemoryStore(RUN, CAPACITY, incarnation=durable.incarnation), durable)


def test_chunks_that_the_front_lost_are_read_from_the_durable_store(durable: FsspecColumnStore) -> None:
    store = fresh(durable)
    store.open(1)
    columns = [rollout_columns([2, 3]), rollout_columns([4], seed=1)]
    batch = select(put_batch(store, 1, columns), [2, 0, 1])
    expected = store.read(batch, COLUMNS)
    store.flush()
    after = fresh(durable)
    assert after.read(batch, COLUMNS).equals(expected)
    after.open(1)
    assert after.put(key(after, 1), columns[0]) == batch.chunks[0]  # a retry after the loss produces the same
    assert after.read(batch, COLUMNS).equals(expected)  # one chunk from the front, one from the durable store


def test_flush_waits_until_the_bytes_are_durable(durable: FsspecColumnStore) -> None:
    store = fresh(durable)
    store.open(1)
    may_write = threading.Event()
    put_durable = durable._put

    def slow(chunk: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        may_write.wait()
        return put_durable(chunk, columns)

    durable._put = slow  # type: ignore[method-assign]
    batch = put_batch(store, 1, [rollout_columns([2])])  # returns at once
    assert store.read(batch, COLUMNS).num_rows == 1
    with pytest.raises(ChunkNotFoundError):
        durable.verify(batch)
    with ThreadPoolExecutor() as pool:
        flush = pool.submit(store.flush)
        try:
            with pytest.raises(TimeoutError):
                flush.result(timeout=0.2)
        finally:
            may_write.set()
        flush.result()
    durable.verify(batch)


def test_a_failed_durable_write_fails_the_flush_and_a_retry_succeeds(durable: FsspecColumnStore) -> None:
    store = fresh(durable)
    store.open(1)
    put_durable = durable._put

    def broken(chunk: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        raise OSError("no space left on device")

    durable._put = broken  # type: ignore[method-assign]
    batch = put_batch(store, 1, [rollout_columns([2])])
    with pytest.raises(StoreError, match=r"tiers/1/rollout/0/0 .*not durable.*no space left on device"):
        store.flush()
    durable._put = put_durable  # type: ignore[method-assign]
    assert put_batch(store, 1, [rollout_columns([2])]) == batch
    store.flush()
    durable.verify(batch)


def test_a_write_that_failed_before_the_next_put_still_fails_the_flush(durable: FsspecColumnStore) -> None:
    store = fresh(durable)
    store.open(1)
    put_durable = durable._put

    def broken_once(chunk: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        durable._put = put_durable  # type: ignore[method-assign]
        raise OSError("no space left on device")

    durable._put = broken_once  # type: ignore[method-assign]
    store.put(key(store, 1, 0), rollout_columns([2]))
    ((_, written),) = store._pending
    assert isinstance(written.exception(), OSError)  # waits for it
    store.put(key(store, 1, 1), rollout_columns([2]))
    with pytest.raises(StoreError, match=r"tiers/1/rollout/0/0 .*not durable.*no space left on device"):
        store.flush()


def test_damage_in_the_durable_store_is_found_when_its_bytes_are_needed(durable: FsspecColumnStore) -> None:
    store = fresh(durable)
    store.open(1)
    batch = put_batch(store, 1, [rollout_columns([2])])
    store.flush()
    path = data_file(store, batch.chunks[0])
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert store.read(batch, COLUMNS).num_rows == 1  # the front still has it
    with pytest.raises(ChunkCorruptedError, match="checksum"):
        store.verify(batch)
    with pytest.raises(ChunkCorruptedError, match="checksum"):
        fresh(durable).read(batch, COLUMNS)


def test_stores_of_different_incarnations_are_not_paired(durable: FsspecColumnStore) -> None:
    with pytest.raises(StoreError, match="don't belong together"):
        TieredColumnStore(MemoryStore(RUN, CAPACITY), durable)


def test_writes_for_an_abandoned_step_do_not_fail_the_next_one(durable: FsspecColumnStore) -> None:
    store, may_write = fresh(durable), threading.Event()
    store.open(1)
    put_durable, written = durable._put, list[ChunkKey]()

    def held(chunk: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        written.append(chunk)
        may_write.wait()
        return put_durable(chunk, columns)

    durable._put = held  # type: ignore[method-assign]
    for part in range(4):  # more than there are threads: of some, the write has not begun
        store.put(key(store, 1, part), rollout_columns([2]))
    wait_until(lambda: written)
    with ThreadPoolExecutor() as pool:
        cleared = pool.submit(store.clear, 1)  # its stage failed
        try:
            with pytest.raises(TimeoutError):
                cleared.result(timeout=0.2)  # what is being written would be left otherwise
        finally:
            may_write.set()
        cleared.result()
    store.open(2)
    batch = put_batch(store, 2, [rollout_columns([2])])
    store.flush()
    durable.verify(batch)
    assert durable.records(1) == []


@pytest.mark.slow
def test_columns_outlive_the_index(ray_cluster: None, durable: FsspecColumnStore) -> None:
    limits = Limits(CAPACITY, 60, None)
    front = start_shared_store(RUN, limits, incarnation=durable.incarnation)
    store = TieredColumnStore(front, durable)
    store.open(1)
    batch = put_batch(store, 1, [rollout_columns([2, 3])])
    store.flush()
    front.close()
    again = start_shared_store(RUN, limits, incarnation=durable.incarnation)
    try:
        assert TieredColumnStore(again, durable).read(batch, COLUMNS).equals(rollout_columns([2, 3]))
    finally:
        again.close()
