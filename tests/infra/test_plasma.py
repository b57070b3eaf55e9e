"""Guards the one place that uses Ray's private API against the pinned Ray."""

import pyarrow as pa
import pytest
import ray

from infra.stores import plasma
from schemas.errors import ChunkNotFoundError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize("size", [1, 1_000, 5_000_000])
def test_bytes_are_mapped_read_only_at_any_size(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    view = plasma.view(ray.put(data))
    assert view.equals(pa.py_buffer(data))
    assert not view.is_mutable


def test_two_views_are_one_memory_that_outlives_its_reference() -> None:
    ref = ray.put(b"x" * 1_000_000)
    first, second = plasma.view(ref), plasma.view(ref)
    assert first.address == second.address
    del ref, second
    for _ in range(20):
        ray.put(b"y" * 20_000_000)  # more than the object store holds: what isn't pinned is evicted
    assert first.equals(pa.py_buffer(b"x" * 1_000_000))


def test_pickled_objects_and_absent_ones_are_refused() -> None:
    with pytest.raises(ChunkNotFoundError, match="expected b'RAW'"):
        plasma.view(ray.put({"a": 1}))
    with pytest.raises(ChunkNotFoundError, match=r"within 0\.1 s"):
        plasma.view(never_ready.remote(), timeout_seconds=0.1)


@ray.remote(num_cpus=0)
def never_ready() -> bytes:
    import time

    time.sleep(5)
    return b""
