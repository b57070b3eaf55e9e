"""Batches whose samples share prompts: every store reads them as if each row had its own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from infra.stores.base import ColumnStore
from infra.stores.chunk_files import ChunkBlocks
from infra.stores.files import FsspecColumnStore
from infra.stores.tiered import TieredColumnStore
from rl_core.columns.codec import Extent, value_dtypes
from rl_core.columns.jagged import jagged, row_lengths
from rl_core.columns.prompts import rows_of_prompts, share_prompts
from rl_core.views import concat, new_batch, select, split
from schemas.batch import BatchHandle
from tests.contracts.backends import key

NAMES = ("prompt_ids", "response_ids", "prompt_text")
LONG = 600_000  # tokens of a prompt, each of two bytes: more than a block


def rows_of(prompts: list[int], num_tokens: int = 5) -> pa.RecordBatch:
    """Make a row for each prompt's number."""
    responses = np.arange(len(prompts)) % 3
    ids = np.repeat(np.array(prompts, np.uint16), num_tokens)
    return pa.record_batch(
        {
            "prompt_ids": jagged(ids, np.full(len(prompts), num_tokens)),
            "response_ids": jagged(np.arange(responses.sum(), dtype=np.uint16), responses),
            "prompt_text": pa.array([f"prompt {prompt}" for prompt in prompts], pa.string()),
        }
    )


def put_shared(store: ColumnStore, step: int, shards: list[pa.RecordBatch]) -> BatchHandle:
    stored = [share_prompts(rows) for rows in shards]
    refs = [store.put(key(store, step, at), rows) for at, rows in enumerate(stored)]
    rows = pa.Table.from_batches(shards).combine_chunks()
    lengths = [row_lengths(rows[name].combine_chunks()) for name in NAMES[:2]]
    held = pa.chunked_array([shard["prompt_ids"] for shard in stored]).combine_chunks()
    return new_batch(store.run_id, step, 0, refs, value_dtypes(shards[0]), *lengths, rows_of_prompts(held))


def test_a_shared_batch_reads_like_its_rows(store: ColumnStore, step: int) -> None:
    random = np.random.default_rng(step)
    shards = [rows_of(np.repeat(random.integers(0, 3, size), 3).tolist()) for size in (4, 1, 2)]
    batch = put_shared(store, step, shards)
    rows = [row for shard in shards for row in shard.to_pylist()]
    order, some = random.permutation(21), random.integers(0, 21, 30)
    for view, expected in [
        (batch, range(21)),
        (select(batch, order), order),
        (select(select(batch, order), some), order[some]),
        (split(batch, [4, 17])[1], range(4, 21)),
        (concat([select(batch, some), batch]), [*some, *range(21)]),
    ]:
        result = store.read(view, NAMES)
        result.validate(full=True)
        assert result.to_pylist() == [rows[row] for row in expected]
        assert store.read(view, ["response_ids"])["response_ids"].equals(result["response_ids"])


def test_a_repeated_put_of_shared_prompts_is_the_same_chunk(store: ColumnStore, step: int) -> None:
    rows = rows_of([1, 1, 1, 2])
    first = put_shared(store, step, [rows])
    assert put_shared(store, step, [rows]) == first
    assert store.usage().num_chunks == 1


def test_a_prompt_is_in_one_row_of_what_a_read_fetches(store: ColumnStore, step: int) -> None:
    batch = put_shared(store, step, [rows_of([1] * 4 + [2] * 4)])
    inner: Any = store.front if isinstance(store, TieredColumnStore) else store
    fetch, fetched = inner._fetch, []
    inner._fetch = lambda reads: fetched.extend(reads) or fetch(reads)
    try:
        store.read(select(batch, [6, 7, 2]), NAMES)
    finally:
        inner._fetch = fetch
    (read,) = fetched
    parts = [(sorted(part.names), set(part.starts.tolist())) for part in read.parts]
    assert parts == [(["prompt_ids", "prompt_text"], {0, 4}), (["response_ids"], {2, 6})]


def test_a_prompts_bytes_are_loaded_once(store: ColumnStore, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(store, FsspecColumnStore):
        pytest.skip("it maps its chunks")
    batch = put_shared(store, step, [rows_of([1] * 4 + [2] * 4 + [3] * 4, LONG)])
    assert batch.chunks[0].num_bytes < 3 * 2 * LONG + 2_000  # three prompts, not twelve
    loaded, load = set[int](), ChunkBlocks.load

    def spy(blocks: ChunkBlocks, ranges: Sequence[Extent]) -> None:
        load(blocks, ranges)
        loaded.update(blocks._loaded)

    monkeypatch.setattr(ChunkBlocks, "load", spy)
    rows = store.read(select(batch, [0, 1, 2, 3]), ["prompt_ids"])
    assert row_lengths(rows["prompt_ids"]).tolist() == [LONG] * 4
    assert loaded == {0, 1, 3}  # the first prompt's, and the end, where the file says what it holds
