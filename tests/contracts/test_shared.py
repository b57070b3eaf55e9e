"""The shared store: ownership across processes, the death of each of them, and its doors to the outside."""

import ipaddress
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import ray
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pyarrow import flight

from infra.stores.flight import Endpoint, FlightClient, Tls
from infra.stores.shared import SharedColumnStore
from infra.stores.shared_index import Limits
from infra.stores.shared_open import find_shared_store, start_shared_store
from rl_core.columns.codec import encode, value_dtypes
from rl_core.views import new_batch
from schemas.batch import BatchHandle
from schemas.errors import (
    CapacityError,
    ChunkCorruptedError,
    ChunkNotFoundError,
    ConfigError,
    DuplicateChunkError,
    LeaseError,
    StaleIncarnationError,
    StoreError,
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
    stored_bytes,
)
from tests.contracts.clock import ManualClock
from tests.progress import wait_until

pytestmark = pytest.mark.slow

RUN = "shared-contract"
LIMITS = Limits(CAPACITY, NEVER_SECONDS, 3600, None)
SMALL, LARGE = [2, 0, 3], [2, 0, 400_000]


@pytest.fixture
def store(ray_cluster: None) -> Iterator[SharedColumnStore]:
    made = start_shared_store(RUN, LIMITS)
    made.open_lease(1)
    yield made
    with suppress(WorkerLostError):  # the test closed it
        find_shared_store(RUN).close()


def files(store: SharedColumnStore) -> list[str]:
    """Return the names of the chunk files on this node."""
    return sorted(path.name for path in Path(store._member.folder).glob("*.arrow"))


def index_process() -> psutil.Process:
    _, pid = ray.get(ray.get_actor(f"sluice/{RUN}/store", namespace="sluice").ping.remote())
    return psutil.Process(pid)


def has_no_index() -> bool:
    """Return whether Ray knows that the index is dead."""
    try:
        find_shared_store(RUN)
    except WorkerLostError as error:
        return "has no column store" in str(error)
    return False


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


def test_cleared_chunks_leave_shared_memory_and_stay_readable_where_they_were_read(store: SharedColumnStore) -> None:
    batch = put_batch(store, 1, [rollout_columns(LARGE)])
    assert len(files(store)) == 1
    result = store.read(batch, COLUMNS)
    store.clear(1)
    assert files(store) == []
    store.open_lease(2)
    put_batch(store, 2, [rollout_columns(LARGE, seed=1)])
    assert result.equals(rollout_columns(LARGE))


def test_the_memory_of_a_cleared_chunk_is_reused_once_nobody_reads_it(store: SharedColumnStore) -> None:
    def put(step: int) -> tuple[int, BatchHandle]:
        store.open_lease(step)
        batch = put_batch(store, step, [rollout_columns(LARGE, seed=step)])
        (name,) = files(store)
        return (Path(store._member.folder) / name).stat().st_ino, batch

    first, batch = put(1)
    result = store.read(batch, ["response_ids"])
    store.clear(1)
    second, _ = put(2)
    assert second != first  # it is still read
    assert result.column(0).equals(rollout_columns(LARGE, seed=1).column(0))
    del result
    store.clear(2)
    third, batch = put(3)
    assert third == second
    assert store.read(batch, COLUMNS).equals(rollout_columns(LARGE, seed=3))
    store.clear(3)
    store.open_lease(4)
    smaller = put_batch(store, 4, [rollout_columns([*LARGE[:-1], 200_000])])
    assert store.read(smaller, COLUMNS).num_rows == 3
    free = Path(store._member.folder) / "free"
    assert sum(path.stat().st_size for path in free.iterdir()) <= CAPACITY


def test_replicas_leave_one_chunk_and_a_diverging_one_is_rejected(store: SharedColumnStore) -> None:
    siblings = [start_producer() for _ in range(3)]
    puts = [sibling.put.remote(RUN, 1, LARGE).future() for sibling in siblings]
    assert len({put.result() for put in puts}) == 1
    assert store.usage().num_chunks == len(files(store)) == 1
    with pytest.raises(DuplicateChunkError, match="'response_ids' first differs in row 0 of 3"):
        siblings[0].put.remote(RUN, 1, LARGE, 1).future().result()


class StuckProducer:
    """A producer that hangs in the middle of its write."""

    writing = threading.Event()

    def put(self, run_id: str, step: int, lengths: list[int]) -> None:
        store: Any = find_shared_store(run_id)
        write = store._write

        def stuck(*arguments: Any) -> None:
            write(*arguments)
            self.writing.set()
            threading.Event().wait()

        store._write = stuck
        store.put(key(store, step), rollout_columns(lengths))

    @ray.method(concurrency_group="watch")
    def is_writing(self) -> bool:
        return self.writing.is_set()


def start_stuck_producer() -> Any:
    return ray.remote(concurrency_groups={"watch": 1})(StuckProducer).options(num_cpus=0).remote()


def test_a_writer_that_dies_while_writing_frees_the_key_for_its_sibling(store: SharedColumnStore) -> None:
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
    wait_until(lambda: len(files(store)) == 1)  # what the dead one had written is removed


def test_a_step_cleared_during_a_write_gets_no_chunk(store: SharedColumnStore) -> None:
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
    wait_until(lambda: len(files(store)) == 1)


def test_a_key_that_another_process_writes_for_too_long_is_an_error(ray_cluster: None) -> None:
    store = start_shared_store(RUN, LIMITS._replace(put_timeout_seconds=0.2))
    try:
        store.open_lease(1)
        slow = start_stuck_producer()
        slow.put.remote(RUN, 1, LARGE)
        wait_until(lambda: ray.get(slow.is_writing.remote()))
        with pytest.raises(StoreError, match=r"another process has been writing it for 0\.2 s.*put_timeout_seconds"):
            store.put(key(store, 1), rollout_columns(LARGE))
        assert len(files(store)) == 1
        ray.kill(slow)
    finally:
        store.close()


def test_clients_share_one_index_and_its_typed_errors(store: SharedColumnStore) -> None:
    other = find_shared_store(RUN)
    assert other.incarnation == store.incarnation
    store.put(key(store, 1), rollout_columns([2]))
    assert other.usage() == store.usage()
    with pytest.raises(LeaseError) as caught:
        other.put(key(store, 2), rollout_columns([2]))
    assert type(caught.value) is LeaseError


def test_a_lost_index_is_a_lost_worker_and_a_new_one_is_a_new_incarnation(store: SharedColumnStore) -> None:
    batch = put_batch(store, 1, [rollout_columns([2])])
    folder = Path(store._member.folder)
    store.close()
    assert not folder.exists()
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
            each.open_lease(1)
            put_batch(each, 1, [rollout_columns(LARGE)])
        left, kept = Path(store._member.folder), Path(other._member.folder)
        index_process().kill()
        wait_until(has_no_index)
        assert left.exists()
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
        (b"\x80\x04N.".ljust(1810, b"."), "rollout/0/0: 1810 stored bytes are not an Arrow IPC file"),
    ],
)
def test_a_pickle_under_a_chunks_name_is_not_loaded(store: SharedColumnStore, stored: bytes, message: str) -> None:
    batch = put_batch(store, 1, [rollout_columns([2])])
    assert batch.chunks[0].num_bytes == 1810
    (name,) = files(store)
    (Path(store._member.folder) / name).write_bytes(stored)
    with pytest.raises(ChunkCorruptedError, match=message):
        store.read(batch, ["reward"])


def test_the_index_sweeps_without_a_client(ray_cluster: None, tmp_path: Path) -> None:
    clock = ManualClock(tmp_path / "clock")
    store = start_shared_store("swept", LIMITS._replace(lease_seconds=10), clock=clock)
    try:
        store.open_lease(1)
        store.put(key(store, 1), rollout_columns(SMALL))
        clock.advance(11)
        wait_until(lambda: store.usage().open_leases == ())  # reading the usage doesn't sweep
        assert store.usage().num_bytes == 0
        wait_until(lambda: files(store) == [])
    finally:
        store.close()


def test_a_read_does_not_copy_what_the_producer_wrote(store: SharedColumnStore) -> None:
    ref = start_producer().put.remote(RUN, 1, LARGE).future().result()
    batch = new_batch(RUN, 1, 0, [ref], value_dtypes(rollout_columns(SMALL)), [1, 1, 1], LARGE)
    before = pa.total_allocated_bytes()
    result = store.read(batch, COLUMNS)
    assert result.nbytes > 2_000_000
    assert pa.total_allocated_bytes() - before < 10_000


def test_a_stranger_gets_nothing(store: SharedColumnStore) -> None:
    store.save_batch(put_batch(store, 1, [rollout_columns(SMALL)]))
    location, token, _ = store.endpoint
    for wrong in ("", token[:-1], token[:-1] + ("0" if token[-1] != "0" else "1")):
        stranger = FlightClient(Endpoint(location, wrong))
        with pytest.raises(StoreError, match="refuses this client"):
            stranger.call("usage")
        with pytest.raises(StoreError, match="refuses this client"):
            stranger.get({"step": 1})
    with pytest.raises(flight.FlightUnauthenticatedError):
        list(flight.FlightClient(location).list_flights())


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    """A self-signed certificate for loopback."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sluice")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    begin = datetime.now(UTC) - timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(begin).not_valid_after(begin + timedelta(days=2)).add_extension(address, False)
    found = Tls(str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem"))
    Path(found.certificate).write_bytes(builder.sign(private, SHA256()).public_bytes(Encoding.PEM))
    Path(found.key).write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return found


def test_connections_are_encrypted_by_a_certificate(ray_cluster: None, tls: Tls) -> None:
    store = start_shared_store("encrypted", LIMITS._replace(tls=tls))
    try:
        store.open_lease(1)
        store.save_batch(put_batch(store, 1, [rollout_columns(SMALL)]))
        assert store.endpoint.location.startswith("grpc+tls://")
        assert FlightClient(store.endpoint).get({"step": 1, "columns": ["reward"]}).num_rows == 3
        for stranger in (
            store.endpoint._replace(certificate=""),
            Endpoint(store.endpoint.location.replace("+tls", ""), store.endpoint.token),
        ):
            with pytest.raises(ConnectionError):
                FlightClient(stranger).call("usage")
    finally:
        store.close()


def test_a_certificate_that_is_not_there_is_named(ray_cluster: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.tls_certificate and runtime\.tls_key must be readable.*absent"):
        start_shared_store("encrypted", LIMITS._replace(tls=Tls(str(tmp_path / "absent"), "absent")))


def test_any_arrow_client_reads_a_live_step(store: SharedColumnStore) -> None:
    store.save_batch(put_batch(store, 1, [rollout_columns(SMALL), rollout_columns([4], seed=1)]))
    location, token, _ = store.endpoint
    options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])
    ticket = flight.Ticket(json.dumps({"step": 1, "columns": ["reward", "response_ids"]}).encode())
    table = flight.FlightClient(location).do_get(ticket, options).read_all()
    expected = pa.Table.from_batches([rollout_columns(SMALL), rollout_columns([4], seed=1)])
    assert table.equals(expected.select(["reward", "response_ids"]))
    with pytest.raises(ChunkNotFoundError, match=r"step 7 has no columns here; steps: \[1\]"):
        FlightClient(store.endpoint).get({"step": 7})


def test_a_put_waits_for_full_shared_memory_and_then_names_the_setting(ray_cluster: None, small_memory: Path) -> None:
    chunk = rollout_columns([400_000])  # 2.5 MB of 8 MiB
    store = start_shared_store("full", Limits(2**30, NEVER_SECONDS, 3600, str(small_memory)))
    impatient = start_shared_store("impatient", Limits(2**30, 0.5, 3600, str(small_memory)))
    try:
        for each in (store, impatient):
            each.open_lease(1)
        for shard in range(3):
            store.put(key(store, 1, shard), chunk)
        with pytest.raises(CapacityError, match=r"can't put impatient/1.*is full.*runtime\.shared_memory"):
            impatient.put(key(impatient, 1), chunk)
        assert files(impatient) == []
        assert impatient.usage().num_bytes == 0
        store.open_lease(2)
        waiting = threading.Thread(target=lambda: store.put(key(store, 2), chunk))
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive()
        find_shared_store("full").clear(1)
        waiting.join()
        assert store.usage().num_chunks == 1
    finally:
        store.close()
        impatient.close()


def test_the_index_is_light(store: SharedColumnStore) -> None:
    index = index_process()
    mapped = {Path(each.path).name for each in index.memory_maps()}
    assert not {name for name in mapped if name.startswith(("libtorch", "libc10"))}
    assert index.memory_full_info().uss < 150 * 2**20
