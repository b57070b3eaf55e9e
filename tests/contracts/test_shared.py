"""The shared store: ownership across processes, and the death of each of them."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray

from infra.stores.shared import index
from infra.stores.shared.client import SharedColumnStore
from infra.stores.shared.index import find_shared_store, start_shared_store
from rl_core.columns import codec
from rl_core.columns.codec import encode, value_dtypes
from rl_core.views import new_batch
from schemas.errors import (
    ChunkCorruptedError,
    DuplicateChunkError,
    StaleIncarnationError,
    StepNotOpenError,
    WorkerLostError,
)
from tests.contracts.backends import (
    COLUMNS,
    key,
    put_batch,
    read_elsewhere,
    rollout_columns,
    start_producer,
    stored_bytes,
)
from tests.contracts.shared_stores import LARGE, LIMITS, RUN, SMALL, files, has_no_index, index_process, shared_store
from tests.support.progress import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def store(ray_cluster: None) -> Iterator[SharedColumnStore]:
    with shared_store() as made:
        yield made


@pytest.mark.parametrize("lengths", [SMALL, LARGE])
def test_columns_outlive_their_producer(store: SharedColumnStore, lengths: list[int]) -> None:
    producer = start_producer()
    ref = producer.put.remote(RUN, 1, lengths).future().result()
    ray.kill(producer)
    with pytest.raises(ray.exceptions.RayActorError):
        producer.put.remote(RUN, 1, lengths).future().result()
    columns = rollout_columns(lengths)
    assert ref.num_bytes == encode(columns).size
    batch = new_batch(RUN, 1, 0, [ref], value_dtypes(columns), [1, 1, 1], lengths)
    assert store.read(batch, COLUMNS).equals(columns)
    assert read_elsewhere.remote(RUN, batch).future().result() == columns.to_pylist()
    assert stored_bytes(store, ref)[0].equals(encode(columns))


def test_replicas_leave_one_chunk_and_a_diverging_one_is_rejected(store: SharedColumnStore) -> None:
    siblings = [start_producer() for _ in range(3)]
    puts = [sibling.put.remote(RUN, 1, LARGE).future() for sibling in siblings]
    assert len({put.result() for put in puts}) == 1
    assert store.usage().num_chunks == 1
    wait_until(lambda: len(files(store)) == 1)
    with pytest.raises(DuplicateChunkError, match="'response_ids' first differs in row 0 of 3"):
        siblings[0].put.remote(RUN, 1, LARGE, 1).future().result()


class StuckProducer:
    """A producer that hangs in the middle of its write."""

    writing = threading.Event()

    def put(self, run_id: str, step: int, lengths: list[int]) -> None:
        store: Any = find_shared_store(run_id)
        write = codec.write

        def stuck(*arguments: Any) -> None:
            write(*arguments)
            if not isinstance(arguments[1], pa.MockOutputStream):  # which only counts the bytes
                self.writing.set()
                threading.Event().wait()

        codec.write = stuck
        store.put(key(store, step), rollout_columns(lengths))

    @ray.method(concurrency_group="watch")
    def is_writing(self) -> bool:
        return self.writing.is_set()


def test_a_writer_that_dies_while_writing_leaves_nothing(store: SharedColumnStore) -> None:
    dying: Any = ray.remote(concurrency_groups={"watch": 1})(StuckProducer).options(num_cpus=0).remote()
    stuck = dying.put.remote(RUN, 1, LARGE).future()
    wait_until(lambda: ray.get(dying.is_writing.remote()))
    assert store.usage().num_chunks == len(files(store)) == 0  # nothing half-written is readable
    ref = start_producer().put.remote(RUN, 1, LARGE).future().result()  # nor does it hold up another writer
    (half,) = Path(store._member.folder).glob("pool/*.new")
    time.sleep(2 * index._MAINTENANCE_SECONDS)
    assert half.exists()  # its writer lives
    ray.kill(dying)
    with pytest.raises(ray.exceptions.RayActorError):
        stuck.result()
    wait_until(lambda: not half.exists())
    batch = new_batch(RUN, 1, 0, [ref], value_dtypes(rollout_columns(LARGE)), [1, 1, 1], LARGE)
    assert store.read(batch, COLUMNS).equals(rollout_columns(LARGE))


def test_a_step_cleared_during_a_write_gets_no_chunk(store: SharedColumnStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write = codec.write

    def clear_first(*arguments: Any) -> None:
        if not isinstance(arguments[1], pa.MockOutputStream):
            assert find_shared_store(RUN).clear(1) == 0
        write(*arguments)

    monkeypatch.setattr(codec, "write", clear_first)
    with pytest.raises(StepNotOpenError, match="step 1 is not open"):
        store.put(key(store, 1), rollout_columns(LARGE))
    wait_until(lambda: not files(store))
    assert store.usage().num_bytes == 0


def test_clients_share_one_index_and_its_typed_errors(store: SharedColumnStore) -> None:
    other = find_shared_store(RUN)
    assert other.incarnation == store.incarnation
    store.put(key(store, 1), rollout_columns([2]))
    assert other.usage() == store.usage()
    with pytest.raises(StepNotOpenError) as caught:
        other.put(key(store, 2), rollout_columns([2]))
    assert type(caught.value) is StepNotOpenError


def test_a_lost_index_is_a_lost_worker_and_a_new_one_is_a_new_incarnation(store: SharedColumnStore) -> None:
    batch = put_batch(store, 1, [rollout_columns([2])])
    folder, other = Path(store._member.folder), find_shared_store(RUN)
    store.close()
    assert not folder.exists()
    with pytest.raises(WorkerLostError, match="shared-contract is gone"):
        other.put(key(store, 1, 1), rollout_columns([2]))
    with pytest.raises(WorkerLostError, match="shared-contract is gone"):
        store.read(batch, ["reward"])
    wait_until(has_no_index)
    fresh = start_shared_store(RUN, LIMITS)
    assert fresh.incarnation != store.incarnation
    with pytest.raises(StaleIncarnationError, match="run the stage that produces it again"):
        fresh.read(batch, ["reward"])


def test_what_a_killed_index_left_is_removed_by_the_next_start(store: SharedColumnStore) -> None:
    other = start_shared_store("side-by-side", LIMITS)
    try:
        for each in (store, other):
            each.open(1)
            put_batch(each, 1, [rollout_columns(LARGE)])
        left, kept = Path(store._member.folder), Path(other._member.folder)
        assert left.exists()
        index_process().kill()
        wait_until(has_no_index)  # from here on, the start of any test's store removes it
        fresh = start_shared_store(RUN, LIMITS)
        assert not left.exists()
        assert len(files(other)) == 1  # another run on the same node
        assert Path(fresh._member.folder).exists()
        assert kept.exists()
    finally:
        other.close()


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (b"\x80\x04N." * 500, "chunk shared-contract/1/rollout/0/0: 2000 bytes are stored"),
        (b"\x80\x04N.".ljust(2266, b"."), "rollout/0/0: 2266 stored bytes are not an Arrow IPC file"),
    ],
)
def test_a_pickle_under_a_chunks_name_is_not_loaded(store: SharedColumnStore, stored: bytes, message: str) -> None:
    batch = put_batch(store, 1, [rollout_columns([2])])
    assert batch.chunks[0].num_bytes == 2266
    (name,) = files(store)
    (Path(store._member.folder) / name).write_bytes(stored)
    with pytest.raises(ChunkCorruptedError, match=message):
        store.read(batch, ["reward"])
