"""Results and errors of reads."""

import numpy as np
import pyarrow as pa
import pytest

from infra.stores.base import ColumnStore
from infra.stores.tiered import TieredColumnStore
from rl_core.columns.codec import value_dtypes
from rl_core.columns.jagged import as_tensor, flat_values, jagged
from rl_core.views import select, split, with_column
from schemas.errors import (
    ChunkCorruptedError,
    ChunkNotFoundError,
    ColumnError,
    ColumnNotFoundError,
    StaleIncarnationError,
    StoreError,
)
from tests.contracts.backends import COLUMNS, Backend, key, put_batch, rollout_columns, stored_bytes


def test_a_read_returns_exactly_the_asked_columns_in_order(store: ColumnStore, step: int) -> None:
    columns = rollout_columns([2, 0, 3])
    batch = put_batch(store, step, [columns])
    assert store.read(batch, COLUMNS).equals(columns)
    names = ["reward", "response_ids"]
    assert store.read(batch, names).equals(columns.select(names))


def test_a_read_names_its_columns(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([1])])
    for names in ([], ["reward", "reward"]):
        with pytest.raises(ValueError, match="must name at least one column, and each only once"):
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
        (select(batch, order), order),
        (select(select(batch, order), some), order[some]),
        (select(batch, range(5, 13)), range(5, 13)),  # across the chunk without rows
        (split(batch, [4, 13])[1], range(4, 17)),
        (select(batch, np.repeat(np.arange(17), 2)), np.repeat(np.arange(17), 2)),
        (select(select(batch, order), np.flatnonzero(order % 3 == 0)), order[order % 3 == 0]),
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
        store.put(key(store, step, 0, "logprob"), values, batch=view),
        store.put(key(store, step, 1, "logprob"), rest, batch=select(batch, [1])),
    ]
    batch = with_column(batch, {"behavior_logprobs": "float"}, refs, [2, 0, 1])
    result = store.read(select(batch, [1, 2, 0]), ["behavior_logprobs", "response_ids"])
    assert result.column(0).to_pylist() == [[], [0.0, 1.0, 2.0], [3.0, 4.0]]
    assert result.column(1).to_pylist() == [columns.column(0)[row].as_py() for row in (1, 2, 0)]


def test_layout_does_not_depend_on_the_data(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([1, 1, 1]), rollout_columns([1])])
    for view in (batch, select(batch, [3, 0]), select(batch, range(1)), select(batch, [])):
        result = store.read(view, COLUMNS)
        assert result.schema.equals(rollout_columns([1, 1]).schema)
        assert as_tensor(result.column("reward")).shape == (view.num_rows,)
        assert as_tensor(result.column("response_ids")).shape == (view.num_rows,)


def test_empty_rows_and_batches_without_rows_are_legal(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([]), rollout_columns([0, 0])])
    result = store.read(batch, COLUMNS)
    assert result.num_rows == 2
    assert result.column("response_ids").to_pylist() == [[], []]
    nothing = store.read(select(batch, range(0)), COLUMNS)
    assert nothing.num_rows == 0
    assert nothing.schema.equals(result.schema)


def test_a_range_of_one_chunk_is_read_without_a_copy(backend: Backend, store: ColumnStore, step: int) -> None:
    if backend.kind in ("s3", "fsspec-memory"):
        pytest.skip("its bytes are remote")
    batch = put_batch(store, step, [rollout_columns([4, 250_000, 6])])
    store.flush()
    before = pa.total_allocated_bytes()
    whole = store.read(batch, ["sampler_logprobs"]).column(0)
    part = store.read(select(batch, range(1, 3)), ["sampler_logprobs"]).column(0)
    assert pa.total_allocated_bytes() - before < 10_000
    assert np.array_equal(flat_values(part), flat_values(whole)[4:])


def test_bytes_read_counts_the_columns_returned(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([4, 5, 6]), rollout_columns([3])])
    before = store.bytes_read
    store.read(select(batch, [3, 1]), ["sampler_logprobs"])
    assert store.bytes_read - before == (3 + 5) * 4 + 2 * 8  # values, and one offset per row


def test_a_read_result_is_read_only(store: ColumnStore, step: int) -> None:
    columns = rollout_columns([2, 3])
    batch = put_batch(store, step, [columns])
    for view in (batch, select(batch, [1, 0])):
        result = store.read(view, COLUMNS)
        for name in ("response_ids", "sampler_logprobs"):
            with pytest.raises(ValueError, match="read-only"):
                flat_values(result.column(name))[0] = 1
        for name in ("response_ids", "loss_mask", "reward"):
            as_tensor(result.column(name)).zero_()  # converted, so a copy
    assert not stored_bytes(store, batch.groups[0].chunks[0])[0].is_mutable
    assert store.read(batch, COLUMNS).equals(columns)


def test_a_put_copies_the_producers_arrays(store: ColumnStore, step: int) -> None:
    values = np.array([1, 2, 3], dtype=np.uint16)
    columns = pa.record_batch({"response_ids": jagged(values, np.array([1, 2]))})
    batch = put_batch(store, step, [columns])
    values[:] = 0
    assert store.read(batch, ["response_ids"]).column(0).to_pylist() == [[1], [2, 3]]


def test_a_read_after_clear_raises_and_earlier_results_stay_valid(store: ColumnStore, step: int) -> None:
    columns = rollout_columns([2, 3])
    batch = put_batch(store, step, [columns])
    result = store.read(batch, COLUMNS)
    store.flush()
    store.clear(step)
    with pytest.raises(ChunkNotFoundError, match=f"{store.run_id}/{step}/rollout/0/0 is not in the store"):
        store.read(batch, ["reward"])
    store.open(step)
    with pytest.raises(ChunkNotFoundError):
        store.read(batch, ["reward"])
    store.put(key(store, step, 1), rollout_columns([9] * 50))  # would overwrite freed bytes
    assert result.equals(columns)


def test_a_handle_of_another_incarnation_is_never_served(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([1])])
    group = batch.groups[0]
    stale = group.replace(chunks=(group.chunks[0].replace(incarnation="before"),))
    with pytest.raises(StaleIncarnationError, match="previous store \\(before"):
        store.read(batch.replace(groups=(stale,)), ["reward"])


def test_a_handle_that_misstates_its_chunks_is_rejected(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([2, 3])])
    group = batch.groups[0]
    for changes, error in [
        ({"dtypes": {"response_ids": "int32"}}, ColumnError),
        ({"dtypes": {"answer": "string"}}, ColumnNotFoundError),
        ({"chunks": (group.chunks[0].replace(num_rows=9),)}, StoreError),
        ({"chunks": (group.chunks[0].replace(num_bytes=9),)}, ChunkCorruptedError),
    ]:
        wrong = batch.replace(groups=(group.replace(**changes),))
        with pytest.raises(error, match=group.chunks[0].key):
            store.read(wrong, [wrong.columns[0]])


def test_a_read_of_many_chunks_fetches_each_once(store: ColumnStore, step: int) -> None:
    parts = [rollout_columns([3] * 20, seed) for seed in range(4)]
    batch = select(put_batch(store, step, parts), np.random.default_rng(0).permutation(80))
    inner = store.front if isinstance(store, TieredColumnStore) else store
    fetch, fetched = inner._fetch, []
    inner._fetch = lambda reads: fetched.extend(reads) or fetch(reads)  # type: ignore[method-assign]
    try:
        store.read(batch, ["response_ids", "reward"])
    finally:
        inner._fetch = fetch  # type: ignore[method-assign]
    assert [read.ref for read in fetched] == list(dict.fromkeys(read.ref for read in fetched))
    assert len(fetched) == 4
    parts_read = [part for read in fetched for part in read.parts]
    assert sum(int((part.stops - part.starts).sum()) for part in parts_read) == 80
    assert {part.names for part in parts_read} == {frozenset({"response_ids", "reward"})}


def test_deleted_chunks_are_freed_once(store: ColumnStore, step: int) -> None:
    batch = put_batch(store, step, [rollout_columns([50] * 20, seed) for seed in range(2)])
    store.flush()
    assert store.delete(batch.chunks[:1]) == batch.chunks[0].num_bytes
    assert store.delete(batch.chunks[:1]) == 0
    assert store.usage().num_bytes == batch.chunks[1].num_bytes
    assert store.read(select(batch, [33]), ["reward"]).num_rows == 1
    with pytest.raises(ChunkNotFoundError):
        store.read(select(batch, [33, 2]), ["reward"])


def test_value_dtypes_survive_an_empty_selection(store: ColumnStore, step: int) -> None:
    columns = rollout_columns([2, 3])
    nothing = store.read(select(put_batch(store, step, [columns]), []), COLUMNS)
    assert value_dtypes(nothing) == value_dtypes(columns)
