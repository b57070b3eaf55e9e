"""The shared store's memory, and its doors to the outside."""

import ipaddress
import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pyarrow import flight

from infra.stores.shared.client import SharedColumnStore
from infra.stores.shared.flight import Endpoint, FlightClient, Tls
from infra.stores.shared.index import find_shared_store, start_shared_store
from infra.stores.shared.node_files import Limits
from rl_core.columns.codec import value_dtypes
from rl_core.views import new_batch
from schemas.batch import BatchHandle
from schemas.errors import (
    CapacityError,
    ChunkNotFoundError,
    ConfigError,
    StoreError,
)
from tests.contracts.backends import (
    CAPACITY,
    COLUMNS,
    NEVER_SECONDS,
    key,
    put_batch,
    rollout_columns,
    start_producer,
)
from tests.contracts.shared_stores import LARGE, LIMITS, RUN, SMALL, files, index_process, shared_store

pytestmark = pytest.mark.slow


@pytest.fixture
def store(ray_cluster: None) -> Iterator[SharedColumnStore]:
    with shared_store() as made:
        yield made


def test_cleared_chunks_leave_shared_memory_and_stay_readable_where_they_were_read(store: SharedColumnStore) -> None:
    batch = put_batch(store, 1, [rollout_columns(LARGE)])
    assert len(files(store)) == 1
    result = store.read(batch, COLUMNS)
    store.clear(1)
    assert files(store) == []
    store.open(2)
    put_batch(store, 2, [rollout_columns(LARGE, seed=1)])
    assert result.equals(rollout_columns(LARGE))


def test_the_memory_of_a_cleared_chunk_is_reused_once_nobody_reads_it(store: SharedColumnStore) -> None:
    def put(step: int) -> tuple[int, BatchHandle]:
        store.open(step)
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
    store.open(4)
    smaller = put_batch(store, 4, [rollout_columns([*LARGE[:-1], 200_000])])
    assert store.read(smaller, COLUMNS).num_rows == 3
    pool = Path(store._member.folder) / "pool"
    assert sum(path.stat().st_size for path in pool.iterdir()) <= CAPACITY


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
    assert len(files(store)) == 1
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
        store.open(1)
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
    with pytest.raises(ConfigError, match=r"services\.tls_certificate and services\.tls_key must be readable.*absent"):
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
    chunk = rollout_columns([400_000]).drop_columns(["response_experts"])  # 2.5 MB of 8 MiB
    store = start_shared_store("full", Limits(2**30, NEVER_SECONDS, str(small_memory)))
    impatient = start_shared_store("impatient", Limits(2**30, 0.5, str(small_memory)))
    try:
        for each in (store, impatient):
            each.open(1)
        for shard in range(3):
            store.put(key(store, 1, shard), chunk)
        with pytest.raises(CapacityError, match=r"can't put impatient/1.*is full.*runtime\.shared_memory"):
            impatient.put(key(impatient, 1), chunk)
        assert files(impatient) == []
        assert impatient.usage().num_bytes == 0
        store.open(2)
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
