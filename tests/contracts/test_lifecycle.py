"""Opening, clearing, archiving, accounting, and what survives which loss."""

import pytest

from infra.stores.base import ColumnStore
from infra.stores.files import FsspecColumnStore
from infra.stores.tiered import TieredColumnStore
from schemas.errors import ChunkNotFoundError, StepNotOpenError
from tests.contracts.backends import CAPACITY, COLUMNS, Backend, key, put_batch, rollout_columns


def test_clear_frees_its_step_only_and_once(store: ColumnStore, step: int) -> None:
    other = step * 10  # its name starts with the same digits
    store.open(other)
    kept = put_batch(store, other, [rollout_columns([4])])
    ref = store.put(key(store, step), rollout_columns([2, 3]))
    store.flush()
    assert store.clear(step) == ref.num_bytes
    assert store.clear(step) == 0
    assert store.read(kept, ["response_ids"]).num_rows == 1
    store.clear(other)


def test_usage_counts_what_is_held(backend: Backend) -> None:
    store = backend.make(CAPACITY)
    store.open(3)
    store.open(12)
    refs = [store.put(key(store, 3, shard), rollout_columns([shard] * 2)) for shard in range(3)]
    usage = store.usage()
    assert (usage.num_chunks, usage.num_rows, usage.capacity_bytes) == (3, 6, CAPACITY)
    assert usage.num_bytes == usage.peak_bytes == sum(ref.num_bytes for ref in refs)
    assert usage.open_steps == (3, 12)
    assert backend.another_client(store).usage().num_bytes == usage.num_bytes
    assert store.steps() == [3, 12]
    store.flush()
    store.clear(3)
    after = store.usage()
    assert (after.num_chunks, after.num_rows, after.num_bytes) == (0, 0, 0)
    assert after.peak_bytes == usage.peak_bytes
    assert after.open_steps == (12,)


def test_opening_a_step_again_drops_nothing(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([1])])
    store.open(step)
    assert store.read(batch, ["response_ids"]).num_rows == 1


def test_the_newest_handle_is_found_by_its_step(backend: Backend, store: ColumnStore, step: int) -> None:
    assert store.load_batch(step) is None
    batch = put_batch(store, step, [rollout_columns([1])])
    store.save_batch(batch.replace(policy_version=7))
    store.save_batch(batch)
    assert backend.another_client(store).load_batch(step) == batch
    store.flush()
    store.clear(step)
    assert store.load_batch(step) is None


def test_all_chunks_of_a_step_are_found_whether_or_not_a_handle_has_them(
    backend: Backend, store: ColumnStore, step: int
) -> None:
    other = step * 10
    store.open(other)
    store.put(key(store, other), rollout_columns([3]))
    batch = put_batch(store, step, [rollout_columns([1]), rollout_columns([2])])
    store.save_batch(batch)
    late = store.put(key(store, step, 2), rollout_columns([4]))
    store.flush()
    assert set(backend.another_client(store).chunks(step)) == {*batch.chunks, late}
    store.delete([late])
    assert set(store.chunks(step)) == set(batch.chunks)
    store.clear(step)
    store.clear(other)
    assert store.chunks(step) == []


def test_verify_finds_lost_chunks(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([1]), rollout_columns([2])])
    store.flush()
    store.verify(batch)
    store.delete(batch.chunks[1:])
    with pytest.raises(ChunkNotFoundError, match="rollout/1/0"):
        store.verify(batch)


def test_an_archived_step_rejects_puts_and_uses_no_capacity(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([2])])
    store.save_batch(batch)
    store.flush()
    store.archive(step)
    assert step not in store.usage().open_steps
    with pytest.raises(StepNotOpenError):
        store.put(key(store, step, 1), rollout_columns([1]))
    if isinstance(store, FsspecColumnStore | TieredColumnStore):
        assert store.read(batch, COLUMNS).equals(rollout_columns([2]))
        assert store.load_batch(step) == batch
        store.open(step)  # the step is run again: its chunks are not dropped
        assert store.put(key(store, step), rollout_columns([2])) == batch.chunks[0]
    else:
        with pytest.raises(ChunkNotFoundError):
            store.read(batch, ["reward"])
