"""The Ray backend: ownership across processes, and the death of each of them."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
import ray

from infra.ray import object_store
from infra.stores import chunk_writer
from infra.stores.ray import RayColumnStore
from rl_core.columns.codec import encode, value_dtypes
from rl_core.views import new_batch
from schemas.errors import (
    ChunkCorruptedError,
    ChunkNotFoundError,
    DuplicateChunkError,
    LeaseError,
    StaleIncarnationError,
    WorkerLostError,
)
from tests.contracts.backends import (
    CAPACITY,
    COLUMNS,
    NEVER_SECONDS,
    key,
    put_batch,
    read_elsewhere,
    rollout_columns,
    start_producer,
)
from tests.contracts.clock import ManualClock
from tests.progress import wait_until

pytestmark = pytest.mark.slow

RUN = "ray-contract"
SMALL, LARGE = [2, 0, 3], [2, 0, 400_000]  # sent to the registry, and written by the producer


@pytest.fixture
def store(ray_cluster: None) -> Iterator[RayColumnStore]:
    made = RayColumnStore(RUN, CAPACITY, put_timeout_seconds=NEVER_SECONDS)
    made.open_lease(1)
    yield made
    with suppress(WorkerLostError):  # the test closed it
        RayColumnStore(RUN).close()


@pytest.mark.parametrize("lengths", [SMALL, LARGE])
def test_columns_outlive_their_producer(store: RayColumnStore, lengths: list[int]) -> None:
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
    assert object_store.view_at(store._locations([ref])[0]).equals(encode(columns))


def test_the_registry_owns_what_a_producer_wrote(store: RayColumnStore) -> None:
    written = start_producer().put.remote(RUN, 1, LARGE).future().result()
    sent = store.put(key(store, 1, 7), rollout_columns(SMALL))  # which the registry put itself
    (_, owner, _), (_, registry, _) = store._locations([written, sent])
    assert owner == registry


def test_cleared_chunks_leave_rays_object_store(store: RayColumnStore) -> None:
    producer = start_producer()
    ref = producer.put.remote(RUN, 1, LARGE).future().result()
    location = store._locations([ref])[0]
    assert object_store.view_at(location).size == ref.num_bytes
    store.clear(1)
    with pytest.raises(ChunkNotFoundError, match="it is lost"):
        wait_until(lambda: object_store.view_at(location, NEVER_SECONDS) is None)


def test_replicas_leave_one_chunk_and_a_diverging_one_is_rejected(store: RayColumnStore) -> None:
    siblings = [start_producer() for _ in range(3)]
    puts = [sibling.put.remote(RUN, 1, LARGE).future() for sibling in siblings]
    assert len({put.result() for put in puts}) == 1
    assert store.usage().num_chunks == 1
    with pytest.raises(DuplicateChunkError, match="'response_ids' first differs in row 0 of 3"):
        siblings[0].put.remote(RUN, 1, LARGE, 1).future().result()


def test_a_writer_that_dies_while_writing_frees_the_key_for_its_sibling(store: RayColumnStore) -> None:
    dying, sibling = start_stuck_producer(), start_producer()
    stuck = dying.put.remote(RUN, 1, LARGE).future()
    wait_until(lambda: ray.get(dying.is_writing.remote()))
    waiting = sibling.put.remote(RUN, 1, LARGE).future()
    with pytest.raises(TimeoutError):
        waiting.result(timeout=0.3)  # one writer at a time
    assert store.usage().num_chunks == 0  # nothing half-written is readable
    ray.kill(dying)
    ref = waiting.result()
    with pytest.raises(ray.exceptions.RayActorError):
        stuck.result()
    batch = new_batch(RUN, 1, 0, [ref], value_dtypes(rollout_columns(LARGE)), [1, 1, 1], LARGE)
    assert store.read(batch, COLUMNS).equals(rollout_columns(LARGE))


class StuckWrite(chunk_writer.ChunkWrite):
    """A write that never ends."""

    def write_into(self, target: memoryview) -> int:
        StuckProducer.writing.set()
        threading.Event().wait()
        return super().write_into(target)


class StuckProducer(chunk_writer.ChunkWriter):
    """A producer that hangs in the middle of its write."""

    writing = threading.Event()

    def put(self, run_id: str, step: int, lengths: list[int]) -> None:
        chunk_writer.ChunkWrite = StuckWrite  # type: ignore[misc]
        store = RayColumnStore(run_id)
        store.put(key(store, step), rollout_columns(lengths))

    @ray.method(concurrency_group="watch")
    def is_writing(self) -> bool:
        return self.writing.is_set()


def start_stuck_producer() -> ray.actor.ActorHandle:
    groups = {**chunk_writer.ACTOR_OPTIONS["concurrency_groups"], "watch": 1}
    return ray.remote(concurrency_groups=groups)(StuckProducer).options(num_cpus=0).remote()


def test_a_step_cleared_during_a_write_gets_no_chunk(store: RayColumnStore) -> None:
    dying = start_stuck_producer()
    stuck = dying.put.remote(RUN, 1, LARGE).future()
    wait_until(lambda: ray.get(dying.is_writing.remote()))
    assert store.clear(1) == 0
    ray.kill(dying)
    with pytest.raises(ray.exceptions.RayActorError):
        stuck.result()
    store.open_lease(1)
    assert store.usage().num_bytes == 0
    assert store.put(key(store, 1), rollout_columns(SMALL)).num_rows == 3


def test_clients_share_one_registry_and_its_typed_errors(store: RayColumnStore) -> None:
    other = RayColumnStore(RUN)
    assert other.incarnation == store.incarnation
    store.put(key(store, 1), rollout_columns([2]))
    assert other.usage() == store.usage()
    with pytest.raises(LeaseError) as caught:
        other.put(key(store, 2), rollout_columns([2]))
    assert type(caught.value) is LeaseError


def test_a_lost_registry_is_a_lost_worker_and_a_new_one_is_a_new_incarnation(store: RayColumnStore) -> None:
    batch = put_batch(store, 1, [rollout_columns([2])])
    store.close()
    with pytest.raises(WorkerLostError, match="ray-contract is gone"):
        store.read(batch, ["reward"])
    with pytest.raises(WorkerLostError, match="has no column store"):
        RayColumnStore(RUN)
    fresh = RayColumnStore(RUN, CAPACITY)
    assert fresh.incarnation != store.incarnation
    with pytest.raises(StaleIncarnationError, match="run the stage that produces it again"):
        fresh.read(batch, ["reward"])


@pytest.mark.parametrize(
    ("stored", "error", "message"),
    [
        ({"code": 1}, ChunkNotFoundError, "expected b'RAW'"),
        (b"\x80\x04N." * 500, ChunkCorruptedError, "chunk ray-contract/1/rollout/0/0: 2000 bytes are stored"),
        (
            b"\x80\x04N.".ljust(1810, b"."),
            ChunkCorruptedError,
            "rollout/0/0: 1810 stored bytes are not an Arrow IPC file",
        ),
    ],
)
def test_a_pickle_under_a_chunks_name_is_not_loaded(
    store: RayColumnStore, stored: object, error: type[Exception], message: str
) -> None:
    batch = put_batch(store, 1, [rollout_columns([2])])
    assert batch.chunks[0].num_bytes == 1810
    forged = object_store.locate(ray.put(stored))
    store._locations = lambda refs: [forged]  # type: ignore[method-assign]
    with pytest.raises(error, match=message):
        store.read(batch, ["reward"])


def test_a_large_chunk_from_a_process_that_is_not_a_writer_goes_through_the_registry(store: RayColumnStore) -> None:
    columns = rollout_columns(LARGE)  # this process is a driver
    batch = put_batch(store, 1, [columns])
    assert store.read(batch, COLUMNS).equals(columns)


def test_the_registry_sweeps_without_a_client(ray_cluster: None, tmp_path: Path) -> None:
    clock = ManualClock(tmp_path / "clock")
    store = RayColumnStore("swept", CAPACITY, lease_seconds=10, clock=clock)
    try:
        store.open_lease(1)
        store.put(key(store, 1), rollout_columns(SMALL))
        clock.advance(11)
        wait_until(lambda: store.usage().open_leases == ())  # reading the usage doesn't sweep
        assert store.usage().num_bytes == 0
    finally:
        store.close()


def test_a_read_does_not_copy_what_the_producer_wrote(store: RayColumnStore) -> None:
    producer = start_producer()
    ref = producer.put.remote(RUN, 1, LARGE).future().result()
    batch = new_batch(RUN, 1, 0, [ref], value_dtypes(rollout_columns(SMALL)), [1, 1, 1], LARGE)
    before = pa.total_allocated_bytes()
    result = store.read(batch, COLUMNS)
    assert result.nbytes > 2_000_000
    assert pa.total_allocated_bytes() - before < 10_000
