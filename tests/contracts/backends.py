"""The backends that the contract tests run on, and the rows that they put."""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from infra.stores.base import ColumnStore
from infra.stores.chunk_files import data_path
from infra.stores.chunk_index import MemoryStore
from infra.stores.files import FsspecColumnStore
from infra.stores.shared.client import SharedColumnStore
from infra.stores.shared.index import find_shared_store, start_shared_store
from infra.stores.shared.node_files import Limits, map_chunk
from infra.stores.tiered import TieredColumnStore
from rl_core.columns.codec import value_dtypes
from rl_core.columns.jagged import jagged, row_lengths
from rl_core.views import new_batch
from schemas.batch import BatchHandle, ChunkKey, ChunkRef

COLUMNS = ("response_ids", "loss_mask", "sampler_logprobs", "reward", "response_text", "info", "response_experts")
CAPACITY = 2**24
NEVER_SECONDS = 3600  # a put timeout that no test waits for: one that did would run into pytest's

_numbers = itertools.count()


class Backend:
    """Makes stores of one kind, each for a run of its own, and closes them."""

    def __init__(self, kind: str, folder: Path, s3_options: dict[str, Any] | None = None) -> None:
        self.kind, self._folder, self._s3_options = kind, folder, s3_options
        self._made: list[ColumnStore] = []

    def make(self, capacity_bytes: int = CAPACITY, *, put_timeout_seconds: float = NEVER_SECONDS) -> ColumnStore:
        run_id = f"{self.kind}-{next(_numbers)}"
        store = self._make(run_id, capacity_bytes, put_timeout_seconds)
        self._made.append(store)
        return store

    def another_client(self, store: ColumnStore) -> ColumnStore:
        """Return another client of the same store, as another process has; a memory store is its own only client."""
        if isinstance(store, SharedColumnStore):
            return find_shared_store(store.run_id)
        if isinstance(store, FsspecColumnStore):
            return self._files(store.run_id)
        if isinstance(store, TieredColumnStore):
            return TieredColumnStore(self.another_client(store.front), self._files(store.run_id))
        return store

    def close(self) -> None:
        for store in self._made:
            store.close()

    def _make(self, run_id: str, capacity: int, put_timeout: float) -> ColumnStore:
        limits = Limits(capacity, put_timeout)
        if self.kind == "memory":
            return MemoryStore(run_id, capacity)
        if self.kind == "shared":
            return start_shared_store(run_id, limits)
        if not self.kind.startswith("tiered"):
            return self._files(run_id, capacity, put_timeout)
        durable = self._files(run_id)
        if self.kind == "tiered-memory":
            return TieredColumnStore(MemoryStore(run_id, capacity, durable.incarnation), durable)
        return TieredColumnStore(start_shared_store(run_id, limits, incarnation=durable.incarnation), durable)

    def _files(self, run_id: str, capacity: int = 2**40, put_timeout: float = NEVER_SECONDS) -> FsspecColumnStore:
        options = None
        url = f"{self._folder}/{run_id}"
        if self.kind == "fsspec-memory":
            url = f"memory://{run_id}"
        if self.kind == "s3":
            url, options = f"s3://columns/{run_id}", self._s3_options
        return FsspecColumnStore(run_id, url, capacity, put_timeout_seconds=put_timeout, storage_options=options)


def key(store: ColumnStore, step: int, shard: int = 0, stage: str = "rollout") -> ChunkKey:
    return ChunkKey(run_id=store.run_id, step=step, stage=stage, shard=shard)


def rollout_columns(lengths: Sequence[int], seed: int = 0) -> pa.RecordBatch:
    """Make one row per length. The last reward is null; some texts are empty, the others not ASCII."""
    counts, num_values = np.array(lengths, dtype=np.int64), sum(lengths)
    random = np.random.default_rng(seed)
    rewards = [*random.random(len(lengths)).astype(np.float32).tolist(), None][-len(lengths) :] if lengths else []
    return pa.record_batch(
        {
            "response_ids": jagged(random.integers(0, 2**16, num_values).astype(np.uint16), counts),
            "loss_mask": jagged(random.random(num_values) < 0.5, counts),
            "sampler_logprobs": jagged(-random.random(num_values, dtype=np.float32), counts),
            "reward": pa.array(rewards, pa.float32()),
            "response_text": pa.array(["né\n" * (n % 3) for n in lengths], pa.string()),
            "info": pa.array([json.dumps({"seed": seed, "row": row}) for row in range(len(lengths))], pa.string()),
            "response_experts": jagged(random.integers(0, 256, (num_values, 3)).astype(np.uint8), counts),
        }
    )


def put_batch(store: ColumnStore, step: int, parts: Sequence[pa.RecordBatch]) -> BatchHandle:
    """Put one chunk per part; return the batch of all of them."""
    refs = [store.put(key(store, step, shard), part) for shard, part in enumerate(parts)]
    lengths = np.concatenate([row_lengths(part.column("response_ids")) for part in parts])
    return new_batch(store.run_id, step, 0, refs, value_dtypes(parts[0]), np.ones_like(lengths), lengths)


def stored_bytes(store: ColumnStore, ref: ChunkRef) -> list[pa.Buffer]:
    """Return a chunk's bytes from each place where the store holds them."""
    if isinstance(store, SharedColumnStore):
        (file,) = store._files([ref])
        return [map_chunk(Path(store._member.folder) / file.name, ref)]
    if isinstance(store, MemoryStore):
        return [store._index.payloads([ref])[0]]
    if isinstance(store, FsspecColumnStore):
        return [store._load(ref)]
    assert isinstance(store, TieredColumnStore)
    store.flush()
    return [*stored_bytes(store.front, ref), *stored_bytes(store.durable, ref)]


def data_file(store: ColumnStore, ref: ChunkRef) -> Path:
    """Return the local file that holds a chunk's bytes."""
    files = store.durable if isinstance(store, TieredColumnStore) else store
    assert isinstance(files, FsspecColumnStore)
    chunk = ChunkKey.parse(ref.key)
    record = files._files.find(chunk)
    assert record is not None
    return Path(files._folder._path(data_path(chunk, record.checksum)))


@ray.remote(num_cpus=0)
def read_elsewhere(run_id: str, batch: BatchHandle) -> list[dict[str, Any]]:
    return find_shared_store(run_id).read(batch, COLUMNS).to_pylist()


class Producer:
    """Puts chunks from a process of its own."""

    def put(self, run_id: str, step: int, lengths: list[int], seed: int = 0, shard: int = 0) -> ChunkRef:
        store = find_shared_store(run_id)
        return store.put(key(store, step, shard), rollout_columns(lengths, seed))


def start_producer() -> Any:
    return ray.remote(Producer).options(num_cpus=0).remote()


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers can't import test modules
