"""Two hundred steps, many of which fail in one of the ways that steps fail: nothing of them is left behind."""

from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import ray

from infra.stores.base import ColumnStore
from infra.stores.files import FsspecColumnStore
from infra.stores.shared.index import start_shared_store
from infra.stores.shared.node_files import Limits
from infra.stores.tiered import TieredColumnStore
from rl_core.columns.jagged import jagged, row_lengths
from rl_core.views import new_batch, select, with_column
from schemas.batch import BatchHandle
from schemas.errors import CapacityError, ColumnError, DuplicateChunkError, StoreError
from tests.contracts.backends import COLUMNS, NEVER_SECONDS, data_file, key, rollout_columns, start_producer
from tests.support.progress import wait_until

pytestmark = pytest.mark.slow

LENGTHS = [3, 0, 150_000, 9]  # 1.1 MB per chunk: all steps together exceed the object store
CHUNK_BYTES = 1_100_000
RUN = "leaks"
FAULTS = ("none", "error", "cancel", "second writer", "bad column", "full store", "lost file")
SLOW_FAULTS = {5: "crash", 10: "dead producer", 15: "crash", 20: "dead producer", 30: "crash", 40: "dead producer"}
HARMLESS = ("none", "dead producer", "crash", "lost file")


class StageError(Exception):
    """A stage failed in its own code."""


@pytest.mark.parametrize(
    ("kind", "num_steps"), [pytest.param("shared", 200, marks=pytest.mark.extended), ("tiered", 45)]
)
def test_usage_returns_to_zero_after_every_step(ray_cluster: None, tmp_path: Path, kind: str, num_steps: int) -> None:
    durable = FsspecColumnStore(RUN, str(tmp_path / "columns"))
    limits = Limits(3 * CHUNK_BYTES, NEVER_SECONDS, str(tmp_path / "memory"))
    front = start_shared_store(RUN, limits, incarnation=durable.incarnation)
    store: ColumnStore = TieredColumnStore(front, durable) if kind == "tiered" else front
    random = np.random.default_rng(0)
    producer, happened = start_producer(), Counter[str]()
    try:
        for step in range(num_steps):
            fault = SLOW_FAULTS.get(step) or str(random.choice(FAULTS))
            if fault == "dead producer":
                ray.kill(producer)
                producer = start_producer()
            with nullcontext() if fault in HARMLESS else pytest.raises((StageError, KeyboardInterrupt, CapacityError)):
                run_step(store, producer, step, fault)
            happened[fault] += 1
            found = store.usage().open_steps
            for left in found if fault == "crash" else [step]:  # the driver that resumes finds what is left open
                store.clear(left)
        assert set(happened) == {*FAULTS, *SLOW_FAULTS.values()}
        assert min(happened.values()) >= 3, happened
        with suppress(StoreError):  # chunks of abandoned steps
            store.flush()
        store.clear(num_steps - 1)
        usage = front.usage()
        assert (usage.num_bytes, usage.num_chunks, usage.open_steps) == (0, 0, ())
        assert usage.peak_bytes <= 3 * CHUNK_BYTES
        assert not spilled_files()  # so Ray's object store never held more than a few steps at once
        assert not list((tmp_path / "columns").rglob("*.arrow")) or kind == "tiered"
        for step in store.steps():
            store.clear(step)
        assert [path.name for path in (tmp_path / "columns").rglob("*") if path.is_file()] == ["store.json"]
    finally:
        front.close()


def run_step(store: ColumnStore, producer: object, step: int, fault: str) -> None:
    """Put, read, append, read, with one thing going wrong."""
    store.open(step)
    ref = producer.put.remote(RUN, step, LENGTHS, step).future().result()  # type: ignore[attr-defined]
    columns = rollout_columns(LENGTHS, step)
    lengths = row_lengths(columns.column("response_ids"))
    dtypes = {"response_ids": "uint16", "sampler_logprobs": "float", "reward": "float", "info": "string"}
    batch = select(new_batch(RUN, step, 0, [ref], dtypes, [1] * 4, lengths), [3, 1, 2])
    if fault == "error":
        raise StageError
    if fault == "second writer":
        with pytest.raises((DuplicateChunkError, ray.exceptions.RayTaskError)):
            producer.put.remote(RUN, step, LENGTHS, step + 1).future().result()  # type: ignore[attr-defined]
        raise StageError
    if fault == "bad column":
        with pytest.raises(ColumnError):
            store.put(key(store, step, stage="logprob"), pa.record_batch({"behavior_logprobs": pa.array([1.0])}))
        raise StageError
    scores = pa.record_batch({"behavior_logprobs": jagged(np.zeros(150_009, np.float32), lengths[[3, 1, 2]])})
    behavior = store.put(key(store, step, stage="logprob"), scores, batch)
    if fault == "cancel":
        raise KeyboardInterrupt
    if fault == "full store":
        for shard in range(1, 4):
            store.put(key(store, step, shard), rollout_columns(LENGTHS, shard))
        raise AssertionError("every chunk fitted")
    store.flush()
    if fault == "lost file" and isinstance(store, TieredColumnStore):
        data_file(store, behavior).unlink()  # not needed while the front has the chunk
    check(store, with_column(batch, {"behavior_logprobs": "float"}, [behavior], range(3)), columns)


def check(store: ColumnStore, batch: BatchHandle, columns: pa.RecordBatch) -> None:
    result = store.read(batch, ["response_ids", "info", "behavior_logprobs"])
    for name in ("response_ids", "info"):
        assert name in COLUMNS
        assert result.column(name).equals(columns.column(name).take(pa.array([3, 1, 2])))


def spilled_files() -> list[Path]:
    """Return the files to which Ray has moved objects out of its object store."""
    session = Path(ray._private.worker._global_node.get_session_dir_path())  # type: ignore[attr-defined]
    return [path for path in session.glob("ray_spilled_objects*/*") if path.is_file()]


def test_spilled_files_are_detected(ray_cluster: None) -> None:
    refs = [ray.put(np.zeros(60 * 2**20, np.uint8)) for _ in range(6)]  # more than its 256 MiB
    wait_until(spilled_files)
    del refs
