"""Results and errors of puts."""

import pickle
import pickletools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from infra.stores.base import ColumnStore
from infra.stores.chunk_index import MemoryStore
from infra.stores.tiered import TieredColumnStore
from rl_core.columns.codec import decode, encode
from rl_core.columns.jagged import jagged
from rl_core.views import new_batch, select, with_column
from schemas.batch import ChunkKey, ChunkRef
from schemas.errors import (
    CapacityError,
    ColumnError,
    DuplicateChunkError,
    InvalidKeyError,
    StepNotOpenError,
    StoreError,
)
from tests.contracts.backends import COLUMNS, Backend, key, put_batch, rollout_columns, stored_bytes


def works_in_threads(store: ColumnStore) -> bool:
    """Return whether several clients may put at the same time: not into this process's memory."""
    return not isinstance(store.front if isinstance(store, TieredColumnStore) else store, MemoryStore)


def test_a_column_that_is_not_as_declared_is_rejected(store: ColumnStore, step: int) -> None:
    wide = pa.record_batch({"sampler_logprobs": jagged(np.zeros(2), np.array([2]))})
    ragged = pa.record_batch(
        {
            "response_ids": jagged(np.zeros(3, np.uint16), np.array([1, 2])),
            "loss_mask": jagged(np.zeros(3, bool), np.array([2, 1])),
        }
    )
    before = store.usage()
    with pytest.raises(ColumnError, match="double"):
        store.put(key(store, step), wide)
    with pytest.raises(ColumnError, match="'loss_mask' has 2 values in row 0, expected 1"):
        store.put(key(store, step), ragged)
    assert store.usage() == before


def test_columns_that_do_not_fit_their_batch_are_rejected(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([2, 3])])
    zeros = np.zeros(5, np.float32)
    swapped = pa.record_batch({"behavior_logprobs": jagged(zeros, np.array([3, 2]))})
    with pytest.raises(ColumnError, match="has 3 values in row 0, expected 2"):
        store.put(key(store, step, stage="logprob"), swapped, batch=batch)
    with pytest.raises(ColumnError, match="there are 2 rows, expected the batch's 1"):
        store.put(key(store, step, stage="logprob"), swapped, batch=select(batch, range(1)))
    # Put without its batch, it is rejected when it is read.
    ref = store.put(key(store, step, stage="logprob"), swapped)
    extended = with_column(batch, {"behavior_logprobs": "float"}, [ref], [0, 1])
    with pytest.raises(ColumnError, match="has 3 values in row 0, expected 2"):
        store.read(extended, ["behavior_logprobs"])


def test_a_put_needs_an_open_step(store: ColumnStore, step: int) -> None:
    with pytest.raises(StepNotOpenError, match=f"step {step + 1000} is not open"):
        store.put(key(store, step + 1000), rollout_columns([1]))
    store.clear(step)
    with pytest.raises(StepNotOpenError):
        store.put(key(store, step), rollout_columns([1]))


def test_a_repeated_put_returns_the_same_reference(store: ColumnStore, step: int) -> None:
    columns = rollout_columns([2, 3])
    first = store.put(key(store, step), columns)
    before = store.usage()
    cut = pa.concat_batches([rollout_columns([7]), columns]).slice(1)
    # Equal columns may be encoded as different bytes without meaning, here under the null.
    rewards = np.array([columns.column("reward")[0].as_py(), 5], np.float32)
    masked = columns.set_column(3, "reward", pa.array(rewards, mask=np.array([False, True])))
    assert not encode(masked).equals(encode(columns))
    for repeated in (columns, cut, masked):
        assert store.put(key(store, step), repeated) == first
    assert store.usage() == before


def test_a_second_writer_is_rejected_and_changes_nothing(store: ColumnStore, step: int) -> None:
    columns = rollout_columns([2, 3])
    batch = put_batch(store, step, [columns])
    with pytest.raises(DuplicateChunkError, match="already stored with other content"):
        store.put(key(store, step), rollout_columns([2, 3], seed=1))
    assert store.read(batch, COLUMNS).equals(columns)


def test_two_writers_of_one_key_at_once_leave_one_chunk(backend: Backend) -> None:
    store = backend.make()
    if not works_in_threads(store):
        pytest.skip("one process, one thread")
    store.open(1)
    clients = [backend.another_client(store) for _ in range(4)]
    contents = [rollout_columns([9] * 500, seed) for seed in (0, 0, 1, 1)]

    def put(client: ColumnStore, columns: pa.RecordBatch) -> ChunkRef | None:
        try:
            return client.put(key(client, 1), columns)
        except DuplicateChunkError:
            return None

    with ThreadPoolExecutor() as pool:
        refs = list(pool.map(put, clients, contents))
    winners = [ref for ref in refs if ref is not None]
    assert len(winners) == 2  # the winner, and the client that put the same content
    assert len(set(winners)) == 1
    assert (refs[0] is None) == (refs[1] is None) != (refs[2] is None) == (refs[3] is None)
    assert store.usage().num_chunks == 1
    batch = new_batch(store.run_id, 1, 0, winners[:1], {"reward": "float"}, [1] * 500, [9] * 500)
    assert store.read(batch, ["reward"]).column(0).equals(contents[0 if refs[0] else 2].column("reward"))


def test_a_key_of_another_run_is_rejected(store: ColumnStore, step: int) -> None:
    foreign = ChunkKey(run_id="another", step=step, stage="rollout")
    with pytest.raises(InvalidKeyError, match=f"is of run another, expected {store.run_id}"):
        store.put(foreign, rollout_columns([1]))


@pytest.mark.parametrize(
    "text", ["", "a/1/b/0", "../../etc/1/b/0/0", "a/1/../0/0", "a/-1/b/0/0", "/a/1/b/0/0", "a/1/b/0/0\n", "a/01/b/0/0"]
)
def test_a_malformed_key_is_rejected(store: ColumnStore, step: int, text: str) -> None:
    batch = put_batch(store, step, [rollout_columns([1])])
    group = batch.groups[0]
    forged = group.replace(chunks=(group.chunks[0].replace(key=text),))
    with pytest.raises(InvalidKeyError, match="is not a chunk key"):
        store.read(batch.replace(groups=(forged,)), ["reward"])


def test_capacity_is_a_hard_limit_and_its_error_has_the_numbers(backend: Backend) -> None:
    columns = rollout_columns([5, 6])
    size = encode(columns).size
    store = backend.make(2 * size)
    store.open(1)
    first = store.put(key(store, 1, 0), columns)
    store.put(key(store, 1, 1), columns)
    # No other step could free capacity, so the put doesn't wait for it.
    with pytest.raises(CapacityError, match=f"{size} bytes requested, {2 * size} held, limit {2 * size}"):
        store.put(key(store, 1, 2), columns)
    assert store.put(key(store, 1, 0), columns) == first  # held already: needs no capacity
    store.flush()
    assert store.clear(1) == 2 * size
    store.open(1)
    store.put(key(store, 1, 2), columns)


def test_a_put_waits_until_another_step_is_cleared(backend: Backend) -> None:
    columns = rollout_columns([5, 6])
    store = backend.make(encode(columns).size)
    if not works_in_threads(store):
        pytest.skip("no other client could clear")
    for step in (1, 2):
        store.open(step)
    store.put(key(store, 1), columns)
    store.flush()
    client = backend.another_client(store)
    with ThreadPoolExecutor() as pool:
        put = pool.submit(store.put, key(store, 2), columns)
        with pytest.raises(TimeoutError):
            put.result(timeout=0.3)
        client.clear(1)
        ref = put.result()
    assert store.usage().num_bytes == ref.num_bytes
    assert store.usage().open_steps == (2,)


def test_a_put_that_waits_too_long_is_rejected(backend: Backend) -> None:
    columns = rollout_columns([5, 6])
    size = encode(columns).size
    store = backend.make(size, put_timeout_seconds=0.2)
    for step in (1, 2):
        store.open(step)
    store.put(key(store, 1), columns)
    with pytest.raises(CapacityError, match=f"can't put {key(store, 2)}: {size} bytes requested, {size} held"):
        store.put(key(store, 2), columns)


def test_puts_and_reads_are_counted(store: ColumnStore, step: int) -> None:
    store.take_traffic("before")
    batch = put_batch(store, step, [rollout_columns([2, 3]), rollout_columns([4])])
    result = store.read(batch, COLUMNS)
    traffic = store.take_traffic("rollout")
    assert (traffic.num_puts, traffic.num_reads) == (2, 1)
    assert traffic.put_bytes == sum(ref.num_bytes for ref in batch.chunks)
    assert traffic.read_bytes == result.nbytes
    assert traffic.put_seconds > 0 < traffic.read_seconds
    assert store.take_traffic("rollout").num_puts == 0


def pickles_in(data: bytes) -> list[int]:
    """Return the offsets of complete pickles that would build something when loaded."""
    found = []
    for at in range(len(data) - 1):
        if data[at] != 0x80 or not 2 <= data[at + 1] <= pickle.HIGHEST_PROTOCOL:
            continue
        try:
            names = [opcode.name for opcode, _, _ in pickletools.genops(data[at:])]
        except ValueError:
            continue  # not opcodes up to a STOP
        if len(names) > 2:
            found.append(at)
    return found


def test_stored_bytes_are_arrow_without_pickles(store: ColumnStore, step: int) -> None:
    assert pickles_in(b"head" + pickle.dumps({"a": [1, 2]}) + b"tail") == [4]
    columns = rollout_columns([2, 300, 3])
    ref = store.put(key(store, step), columns)
    for data in stored_bytes(store, ref):
        assert data.size == ref.num_bytes
        assert decode(data).equals(columns)
        assert not pickles_in(data.to_pybytes())


def test_a_chunk_costs_little_more_than_its_values(store: ColumnStore, step: int) -> None:
    lengths = np.random.default_rng(0).integers(100, 400, 256).tolist()
    columns = rollout_columns(lengths).drop_columns(["response_text", "info"])
    tokens = sum(lengths)
    # Ids, mask bits, log-probs, three experts, rewards.
    valid = tokens * 2 + (tokens + 7) // 8 + tokens * 4 + tokens * 3 + len(lengths) * 4
    assert store.put(key(store, step), columns).num_bytes <= 1.02 * valid


def test_a_rejected_put_stores_nothing(store: ColumnStore, step: int) -> None:
    before = store.usage()
    with pytest.raises(StoreError):
        store.put(key(store, step), pa.record_batch({"colour": pa.array([1])}))
    assert store.usage() == before
    assert store.put(key(store, step), rollout_columns([1])).num_rows == 1
