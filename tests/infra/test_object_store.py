"""The one module that uses Ray's private API, against the pinned Ray."""

import pyarrow as pa
import pytest
import ray

from infra.ray import object_store
from infra.stores.ray import RayColumnStore
from rl_core.columns.codec import encode
from schemas.errors import ChunkNotFoundError
from tests.contracts.backends import rollout_columns, start_producer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize("size", [1, 1_000, 5_000_000])
def test_bytes_are_mapped_read_only_at_any_size(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    view = object_store.view(ray.put(data))
    assert view.equals(pa.py_buffer(data))
    assert not view.is_mutable


def test_two_views_are_one_memory_that_outlives_its_reference() -> None:
    ref = ray.put(b"x" * 1_000_000)
    first, second = object_store.view(ref), object_store.view(ref)
    assert first.address == second.address
    del ref, second
    for _ in range(20):
        ray.put(b"y" * 20_000_000)  # more than the object store holds: objects that aren't pinned are evicted
    assert first.equals(pa.py_buffer(b"x" * 1_000_000))


def test_pickled_and_missing_objects_are_rejected() -> None:
    with pytest.raises(ChunkNotFoundError, match="expected b'RAW'"):
        object_store.view(ray.put({"a": 1}))
    never_ready = wait_forever.remote()
    with pytest.raises(ChunkNotFoundError, match=r"within 0\.1 s"):
        object_store.view(never_ready, timeout_seconds=0.1)
    ray.cancel(never_ready, force=True)


@pytest.mark.parametrize("size", [1, 2**16, 90_000, 2**20 - 1, 2**20, 5_000_000])
def test_a_task_returns_what_it_wrote_at_any_size(size: int) -> None:
    data, answer = write_and_return.options(num_returns=2).remote(size, object_store.address())
    assert ray.get(answer) == size
    assert ray.get(read.remote([data])) == object_store.view(data).to_pybytes() == b"w" * size


def test_a_producers_chunks_of_any_size_are_what_it_wrote() -> None:
    store, producer = RayColumnStore("sizes", 2**24), start_producer()
    for step, tokens in enumerate(
        [4_000, 11_000, 15_000, 90_000]
    ):  # around the size up to which Ray sends objects in the reply
        store.open_lease(step)
        ref = producer.put.remote("sizes", step, [tokens]).future().result()
        assert object_store.view_at(store._locations([ref])[0]).equals(encode(rollout_columns([tokens])))
    store.close()


@ray.remote(num_cpus=0)
def write_and_return(size: int, owner: bytes) -> tuple[bytes, int]:
    def fill(target: memoryview) -> int:
        target[:] = b"w" * size
        return len(target)

    return object_store.return_written(size, fill, owner)


@ray.remote(num_cpus=0)
def read(refs: list[ray.ObjectRef[bytes]]) -> bytes:
    return object_store.view(refs[0]).to_pybytes()


@ray.remote(num_cpus=0)
def wait_forever() -> bytes:
    import threading

    threading.Event().wait()
    return b""
