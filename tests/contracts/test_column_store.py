"""The contract of `ColumnStore`, held by every backend; then what only the Ray backend promises."""

import itertools
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray

from infra.stores import plasma
from infra.stores.base import ColumnStore
from infra.stores.memory import MemoryStore
from infra.stores.ray import RayColumnStore
from rl_core.columns.codec import decode, encode, value_dtypes
from rl_core.columns.jagged import as_tensor, flat_values, jagged
from rl_core.views import new_batch, permute, select, slice_rows, split, with_column
from schemas.batch import BatchHandle, ChunkKey, ChunkRef
from schemas.errors import (
    CapacityError,
    ChunkNotFoundError,
    ColumnError,
    ColumnNotFoundError,
    DuplicateChunkError,
    LeaseError,
    StoreError,
    WorkerLostError,
)

RUN = "contract"
CAPACITY = 2**24
COLUMNS = ("response_ids", "loss_mask", "sampler_logprobs", "reward", "response_text", "info")

MakeStore = Callable[[int], ColumnStore]
_steps = itertools.count(1)

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


@pytest.fixture(scope="module", params=["memory", pytest.param("ray", marks=pytest.mark.slow)])
def make_store(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """Makes empty stores of one backend, by capacity in bytes."""
    if request.param == "memory":
        yield MemoryStore
        return
    request.getfixturevalue("ray_cluster")
    made: list[RayColumnStore] = []

    def make(capacity_bytes: int) -> ColumnStore:
        made.append(RayColumnStore(f"contract-{len(made)}", capacity_bytes))
        return made[-1]

    yield make
    for store in made:
        store.destroy()


@pytest.fixture(scope="module")
def store(make_store: MakeStore) -> ColumnStore:
    return make_store(CAPACITY)


@pytest.fixture
def step(store: ColumnStore) -> Iterator[int]:
    """A step of its own, with its lease open; cleared afterwards."""
    number = next(_steps)
    store.open_lease(RUN, number)
    yield number
    store.clear(RUN, number)


def key(step: int, shard: int = 0, stage: str = "rollout") -> ChunkKey:
    return ChunkKey(run_id=RUN, step=step, stage=stage, shard=shard)


def rollout_columns(lengths: Sequence[int], seed: int = 0) -> pa.RecordBatch:
    """One row per length; the last reward is null, and text is neither ASCII nor empty everywhere."""
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
        }
    )


def put_batch(store: ColumnStore, step: int, parts: Sequence[pa.RecordBatch]) -> BatchHandle:
    """Put one chunk per part and return the batch of them all."""
    refs = [store.put(key(step, shard), part) for shard, part in enumerate(parts)]
    lengths = [n for part in parts for n in np.diff(part.column("response_ids").offsets.to_numpy()).tolist()]
    return new_batch(RUN, step, 0, refs, value_dtypes(parts[0]), [1] * len(lengths), lengths)


def stored_bytes(store: ColumnStore, ref: ChunkRef) -> pa.Buffer:
    if isinstance(store, RayColumnStore):
        return plasma.view(store._call("payloads", [ref])[0])
    assert isinstance(store, MemoryStore)
    return store._registry.payloads([ref])[0]


def test_a_read_returns_exactly_the_asked_columns_in_order(store: ColumnStore, step: int) -> None:
    columns = rollout_columns([2, 0, 3])
    batch = put_batch(store, step, [columns])
    assert store.read(batch, COLUMNS).equals(columns)
    names = ["reward", "response_ids"]
    assert store.read(batch, names).equals(columns.select(names))


def test_a_read_names_its_columns(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([1])])
    for names in ([], ["reward", "reward"]):
        with pytest.raises(ValueError, match="names each column"):
            store.read(batch, names)


def test_a_column_that_was_not_produced_is_named(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([1])])
    with pytest.raises(ColumnNotFoundError, match=r"no column 'advantages'; produced so far: response_ids, loss_mask"):
        store.read(batch, ["reward", "advantages"])


def test_any_view_reads_like_fancy_indexing(store: ColumnStore, step: int) -> None:
    random = np.random.default_rng(step)
    parts = [rollout_columns(random.integers(0, 9, size).tolist(), seed) for seed, size in enumerate([5, 0, 1, 7, 4])]
    batch = put_batch(store, step, parts)
    rows = [row for part in parts for row in part.to_pylist()]
    order = random.permutation(17)
    some = random.integers(0, 17, 30)
    for view, expected in [
        (batch, range(17)),
        (permute(batch, order), order),
        (select(permute(batch, order), some), order[some]),
        (slice_rows(batch, 5, 13), range(5, 13)),  # over the chunk without rows
        (split(batch, [4, 13])[1], range(4, 17)),
    ]:
        result = store.read(view, COLUMNS)
        result.validate(full=True)
        assert result.to_pylist() == [rows[row] for row in expected]


def test_columns_put_later_in_another_order_line_up(store: ColumnStore, step: int) -> None:
    columns = rollout_columns([2, 0, 3])
    batch = put_batch(store, step, [columns])
    view = select(batch, [2, 0])
    values = pa.record_batch({"behavior_logprobs": jagged(np.arange(5, dtype=np.float32), np.array([3, 2]))})
    rest = pa.record_batch({"behavior_logprobs": jagged(np.empty(0, np.float32), np.zeros(1, np.int64))})
    refs = [
        store.put(key(step, 0, "logprob"), values, batch=view),
        store.put(key(step, 1, "logprob"), rest, batch=select(batch, [1])),
    ]
    batch = with_column(batch, {"behavior_logprobs": "float"}, refs, [2, 0, 1])
    result = store.read(select(batch, [1, 2, 0]), ["behavior_logprobs", "response_ids"])
    assert result.column(0).to_pylist() == [[], [0.0, 1.0, 2.0], [3.0, 4.0]]
    assert result.column(1).to_pylist() == [columns.column(0)[row].as_py() for row in (1, 2, 0)]


def test_layout_does_not_depend_on_the_data(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([1, 1, 1]), rollout_columns([1])])
    for view in (batch, select(batch, [3, 0]), slice_rows(batch, 0, 1), select(batch, [])):
        result = store.read(view, COLUMNS)
        assert result.schema.equals(rollout_columns([1, 1]).schema)
        assert as_tensor(result.column("reward")).shape == (view.num_rows,)
        assert as_tensor(result.column("response_ids")).shape == (view.num_rows,)


def test_empty_rows_and_batches_without_rows_are_legal(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([]), rollout_columns([0, 0])])
    result = store.read(batch, COLUMNS)
    assert result.num_rows == 2
    assert result.column("response_ids").to_pylist() == [[], []]
    nothing = store.read(slice_rows(batch, 0, 0), COLUMNS)
    assert nothing.num_rows == 0
    assert nothing.schema.equals(result.schema)


def test_a_range_of_one_chunk_is_read_without_a_copy(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([4, 5, 6])])
    whole = store.read(batch, ["sampler_logprobs"]).column(0)
    part = store.read(slice_rows(batch, 1, 3), ["sampler_logprobs"]).column(0)
    assert flat_values(part).ctypes.data == flat_values(whole).ctypes.data + 4 * 4


def test_bytes_read_are_those_of_the_columns_returned(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([4, 5, 6]), rollout_columns([3])])
    before = store.bytes_read
    store.read(select(batch, [3, 1]), ["sampler_logprobs"])
    assert store.bytes_read - before == (3 + 5) * 4 + 2 * 8  # values, and one offset a row


def test_what_a_read_returns_can_not_be_written(store: ColumnStore, step: int) -> None:
    columns = rollout_columns([2, 3])
    batch = put_batch(store, step, [columns])
    for view in (batch, select(batch, [1, 0])):
        result = store.read(view, COLUMNS)
        for name in ("response_ids", "sampler_logprobs"):
            with pytest.raises(ValueError, match="read-only"):
                flat_values(result.column(name))[0] = 1
        for name in ("response_ids", "loss_mask", "reward"):
            as_tensor(result.column(name)).zero_()  # converted, so a copy
    assert not stored_bytes(store, batch.groups[0].chunks[0]).is_mutable
    assert store.read(batch, COLUMNS).equals(columns)


def test_the_producers_arrays_are_its_own_after_a_put(store: ColumnStore, step: int) -> None:
    values = np.array([1, 2, 3], dtype=np.uint16)
    columns = pa.record_batch({"response_ids": jagged(values, np.array([1, 2]))})
    batch = put_batch(store, step, [columns])
    values[:] = 0
    assert store.read(batch, ["response_ids"]).column(0).to_pylist() == [[1], [2, 3]]


def test_a_read_after_clear_raises_and_earlier_results_stay_valid(store: ColumnStore, step: int) -> None:
    columns = rollout_columns([2, 3])
    batch = put_batch(store, step, [columns])
    result = store.read(batch, COLUMNS)
    store.clear(RUN, step)
    with pytest.raises(ChunkNotFoundError, match=f"{RUN}/{step}/rollout/0/0 is not in the store"):
        store.read(batch, ["reward"])
    store.open_lease(RUN, step)
    with pytest.raises(ChunkNotFoundError):
        store.read(batch, ["reward"])
    store.put(key(step, 1), rollout_columns([9] * 50))  # would overwrite freed bytes
    assert result.equals(columns)


def test_a_handle_of_another_generation_is_never_served(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([1])])
    group = batch.groups[0]
    stale = group.replace(chunks=(group.chunks[0].replace(generation="before"),))
    with pytest.raises(ChunkNotFoundError, match="store before, which is gone"):
        store.read(batch.replace(groups=(stale,)), ["reward"])


def test_a_column_that_is_not_as_declared_is_refused(store: ColumnStore, step: int) -> None:
    wide = pa.record_batch({"sampler_logprobs": jagged(np.zeros(2), np.array([2]))})
    ragged = pa.record_batch(
        {
            "response_ids": jagged(np.zeros(3, np.uint16), np.array([1, 2])),
            "loss_mask": jagged(np.zeros(3, bool), np.array([2, 1])),
        }
    )
    before = store.usage()
    with pytest.raises(ColumnError, match="double"):
        store.put(key(step), wide)
    with pytest.raises(ColumnError, match="'loss_mask' has 2 values in row 0, expected 1"):
        store.put(key(step), ragged)
    assert store.usage() == before


def test_columns_that_do_not_fit_their_batch_are_refused(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([2, 3])])
    zeros = np.zeros(5, np.float32)
    swapped = pa.record_batch({"behavior_logprobs": jagged(zeros, np.array([3, 2]))})
    with pytest.raises(ColumnError, match="has 3 values in row 0, expected 2"):
        store.put(key(step, stage="logprob"), swapped, batch=batch)
    with pytest.raises(ColumnError, match="has 2 rows, expected the batch's 1"):
        store.put(key(step, stage="logprob"), swapped, batch=slice_rows(batch, 0, 1))
    # Put without its batch, it is refused where it would be read.
    ref = store.put(key(step, stage="logprob"), swapped)
    extended = with_column(batch, {"behavior_logprobs": "float"}, [ref], [0, 1])
    with pytest.raises(ColumnError, match="has 3 values in row 0, expected 2"):
        store.read(extended, ["behavior_logprobs"])


def test_a_handle_that_misstates_its_chunks_is_refused(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([2, 3])])
    group = batch.groups[0]
    for changes, error in [
        ({"dtypes": {"response_ids": "int32"}}, ColumnError),
        ({"dtypes": {"answer": "string"}}, ColumnNotFoundError),
        ({"chunks": (group.chunks[0].replace(num_rows=9),)}, StoreError),
    ]:
        wrong = batch.replace(groups=(group.replace(**changes),))
        with pytest.raises(error, match=group.chunks[0].key):
            store.read(wrong, [wrong.columns[0]])


def test_a_put_needs_the_steps_lease(store: ColumnStore, step: int) -> None:
    with pytest.raises(LeaseError, match=f"step {step + 1000} has no open lease"):
        store.put(key(step + 1000), rollout_columns([1]))
    store.clear(RUN, step)
    with pytest.raises(LeaseError):
        store.put(key(step), rollout_columns([1]))


def test_opening_a_lease_again_drops_nothing(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([1])])
    store.open_lease(RUN, step)
    assert store.read(batch, ["response_ids"]).num_rows == 1


def test_a_repeated_put_returns_the_same_reference(store: ColumnStore, step: int) -> None:
    columns = rollout_columns([2, 3])
    first = store.put(key(step), columns)
    before = store.usage()
    cut = pa.concat_batches([rollout_columns([7]), columns]).slice(1)
    # Equal columns may encode to other bytes where nobody looks: here, under the null.
    rewards = np.array([columns.column("reward")[0].as_py(), 5], np.float32)
    masked = columns.set_column(3, "reward", pa.array(rewards, mask=np.array([False, True])))
    assert not encode(masked).equals(encode(columns))
    for repeated in (columns, cut, masked):
        assert store.put(key(step), repeated) == first
    assert store.usage() == before


def test_a_second_writer_is_refused_and_changes_nothing(store: ColumnStore, step: int) -> None:
    columns = rollout_columns([2, 3])
    batch = put_batch(store, step, [columns])
    with pytest.raises(DuplicateChunkError, match="already held with other content"):
        store.put(key(step), rollout_columns([2, 3], seed=1))
    assert store.read(batch, COLUMNS).equals(columns)


def test_capacity_is_a_hard_limit_that_names_its_numbers(make_store: MakeStore) -> None:
    columns = rollout_columns([5, 6])
    size = encode(columns).size
    store = make_store(2 * size)
    store.open_lease(RUN, 1)
    first = store.put(key(1, 0), columns)
    store.put(key(1, 1), columns)
    with pytest.raises(CapacityError, match=f"{size} bytes asked, {2 * size} held, limit {2 * size}"):
        store.put(key(1, 2), columns)
    assert store.put(key(1, 0), columns) == first  # held already: costs nothing
    assert store.clear(RUN, 1) == 2 * size
    store.open_lease(RUN, 1)
    store.put(key(1, 2), columns)


def test_clear_frees_its_step_only_and_once(store: ColumnStore, step: int) -> None:
    other = step * 10  # its key starts with the same digits
    store.open_lease(RUN, other)
    kept = put_batch(store, other, [rollout_columns([4])])
    ref = store.put(key(step), rollout_columns([2, 3]))
    assert store.clear(RUN, step) == ref.num_bytes
    assert store.clear(RUN, step) == 0
    assert store.read(kept, ["response_ids"]).num_rows == 1
    store.clear(RUN, other)


def test_usage_counts_what_is_held(make_store: MakeStore) -> None:
    store = make_store(CAPACITY)
    store.open_lease(RUN, 3)
    store.open_lease(RUN, 12)
    refs = [store.put(key(3, shard), rollout_columns([shard] * 2)) for shard in range(3)]
    usage = store.usage()
    assert (usage.num_chunks, usage.num_rows, usage.capacity_bytes) == (3, 6, CAPACITY)
    assert usage.num_bytes == usage.peak_bytes == sum(ref.num_bytes for ref in refs)
    assert usage.open_leases == (f"{RUN}/12", f"{RUN}/3")
    store.clear(RUN, 3)
    after = store.usage()
    assert (after.num_chunks, after.num_rows, after.num_bytes) == (0, 0, 0)
    assert after.peak_bytes == usage.peak_bytes
    assert after.open_leases == (f"{RUN}/12",)


def test_what_is_stored_is_arrow_and_no_pickle(store: ColumnStore, step: int) -> None:
    columns = rollout_columns([2, 3])
    ref = store.put(key(step), columns)
    data = stored_bytes(store, ref)
    assert data.size == ref.num_bytes
    assert decode(data).equals(columns)
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(data)  # noqa: S301 - the point is that it isn't one


@ray.remote(num_cpus=0)
class Producer:
    """Puts one chunk from a process of its own."""

    def put(self, run_id: str, step: int, lengths: list[int]) -> ChunkRef:
        return RayColumnStore(run_id).put(key(step), rollout_columns(lengths))


@ray.remote(num_cpus=0)
def read_elsewhere(run_id: str, batch: BatchHandle) -> list[dict[str, Any]]:
    return RayColumnStore(run_id).read(batch, COLUMNS).to_pylist()


@pytest.fixture
def ray_store(ray_cluster: None) -> Iterator[RayColumnStore]:
    store = RayColumnStore("ray-contract", CAPACITY)
    store.open_lease(RUN, 1)
    yield store
    RayColumnStore("ray-contract", CAPACITY).destroy()


@pytest.mark.slow
def test_columns_outlive_their_producer(ray_store: RayColumnStore) -> None:
    lengths = [2, 0, 40_000]  # large enough for the object store to hold it apart from the call
    producer = Producer.remote()
    ref = producer.put.remote("ray-contract", 1, lengths).future().result()
    ray.kill(producer)
    with pytest.raises(ray.exceptions.RayActorError):
        producer.put.remote("ray-contract", 1, lengths).future().result()
    columns = rollout_columns(lengths)
    batch = new_batch(RUN, 1, 0, [ref], value_dtypes(columns), [1, 1, 1], lengths)
    assert ray_store.read(batch, COLUMNS).equals(columns)
    assert read_elsewhere.remote("ray-contract", batch).future().result() == columns.to_pylist()


@pytest.mark.slow
def test_clients_share_one_registry_and_get_its_own_errors(ray_store: RayColumnStore) -> None:
    other = RayColumnStore.attach("ray-contract")
    assert other is not None
    assert other.generation == ray_store.generation
    ray_store.put(key(1), rollout_columns([2]))
    assert other.usage() == ray_store.usage()
    with pytest.raises(LeaseError) as caught:
        other.put(key(2), rollout_columns([2]))
    assert type(caught.value) is LeaseError


@pytest.mark.slow
def test_a_lost_registry_is_a_lost_worker_and_a_new_one_a_new_generation(ray_store: RayColumnStore) -> None:
    columns = rollout_columns([2])
    ref = ray_store.put(key(1), columns)
    batch = new_batch(RUN, 1, 0, [ref], value_dtypes(columns), [1], [2])
    ray_store.destroy()
    with pytest.raises(WorkerLostError, match="ray-contract is gone"):
        ray_store.read(batch, ["reward"])
    assert RayColumnStore.attach("ray-contract") is None
    fresh = RayColumnStore("ray-contract", CAPACITY)
    assert fresh.generation != ray_store.generation
    with pytest.raises(ChunkNotFoundError, match="run the stage that produces it again"):
        fresh.read(batch, ["reward"])
