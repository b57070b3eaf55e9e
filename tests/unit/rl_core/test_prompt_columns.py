"""Prompts that samples share: what is stored of them, and that no view of a batch shows it."""

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from infra.stores.chunk_index import MemoryStore
from rl_core.columns.codec import encoded_bytes, value_dtypes
from rl_core.columns.jagged import jagged, row_lengths
from rl_core.columns.prompts import repeat_prompts, rows_of_prompts, share_prompts
from rl_core.views import concat, new_batch, read_plan, select, split, with_column
from schemas.batch import BatchHandle, ChunkKey
from schemas.catalog import column_spec

# Of each shard, of each group: its prompt's number, which may be that of another group, and its samples.
SHARDS = st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=5), min_size=1, max_size=3)


def rows_of(groups: Sequence[tuple[int, int]], width: int = 3) -> pa.RecordBatch:
    """Make the rows of a shard's groups; experts and texts differ from prompt to prompt as the tokens do."""
    prompts = [prompt for prompt, samples in groups for _ in range(samples)]
    lengths = np.array([1 + prompt % width for prompt in prompts], np.int64)
    responses = np.arange(len(prompts), dtype=np.int64) % 4
    ids = np.repeat(np.array(prompts, dtype=np.uint16), lengths)
    return pa.record_batch(
        {
            "prompt_ids": jagged(ids, lengths),
            "response_ids": jagged(np.arange(responses.sum(), dtype=np.uint16), responses),
            "prompt_experts": jagged(np.stack([ids, ids + 1], axis=1).astype(np.uint8), lengths),
            "reward": pa.array(np.arange(len(prompts)), pa.float32()),
            "prompt_text": pa.array([f"é{prompt}" * prompt for prompt in prompts], pa.string()),
            "answer": pa.array([""] * len(prompts), pa.string()),
            "info": pa.array([json.dumps({"prompt": prompt}) for prompt in prompts], pa.string()),
        }
    )


def put(shards: Sequence[pa.RecordBatch], *, shared: bool) -> tuple[MemoryStore, BatchHandle]:
    """Put the shards with and without sharing, and an advantage for each row."""
    store = MemoryStore("run", 2**24)
    store.open(0)
    stored = [share_prompts(rows) if shared else rows for rows in shards]
    chunks = [
        store.put(ChunkKey(run_id="run", step=0, stage="rollout", shard=at), rows) for at, rows in enumerate(stored)
    ]
    prompts, responses = (
        np.concatenate([row_lengths(rows[name]) for rows in shards]) for name in ("prompt_ids", "response_ids")
    )
    firsts = np.cumsum([0, *(rows.num_rows for rows in shards)])
    found = np.concatenate(
        [first + rows_of_prompts(rows["prompt_ids"]) for first, rows in zip(firsts[:-1], stored, strict=True)]
    )
    batch = new_batch("run", 0, 0, chunks, value_dtypes(shards[0]), prompts, responses, found if shared else None)
    return store, append(store, batch, "advantages")


def append(store: MemoryStore, batch: BatchHandle, name: str) -> BatchHandle:
    """Put a value for each row, last row first."""
    values = pa.record_batch({name: pa.array(np.arange(batch.num_rows), pa.float32())})
    chunk = store.put(ChunkKey(run_id="run", step=0, stage=name), values)
    return with_column(batch, {name: "float"}, [chunk], range(batch.num_rows)[::-1])


@given(SHARDS)
def test_sharing_is_undone_exactly(shards: list[list[tuple[int, int]]]) -> None:
    for rows in map(rows_of, shards):
        shared = share_prompts(rows)
        assert repeat_prompts(shared).equals(rows)
        later = pa.RecordBatch.from_pylist(rows.to_pylist()[1:], rows.schema)
        assert share_prompts(rows.slice(1)).equals(share_prompts(later))
        held = rows_of_prompts(shared["prompt_ids"])
        assert rows["prompt_ids"].take(pa.array(held)).equals(rows["prompt_ids"])
        for name in shared.schema.names:
            if not column_spec(name).is_of_prompt:
                assert shared[name].equals(rows[name])


@given(SHARDS, st.data())
def test_every_view_of_a_shared_batch_reads_as_that_of_an_unshared_one(
    shards: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    parts = [rows_of(groups) for groups in shards]
    stores = [put(parts, shared=shared) for shared in (True, False)]
    num_rows = sum(part.num_rows for part in parts)
    some = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=20) if num_rows else st.just([]))
    order = data.draw(st.permutations(range(num_rows)))
    cut = data.draw(st.integers(0, num_rows))
    views = [
        [
            batch,
            select(batch, some),
            select(batch, order),
            select(select(batch, order), some),
            *split(batch, [cut, num_rows - cut]),
            concat([select(batch, some), select(batch, order)]),
            append(store, select(batch, order), "reward_more"),
        ]
        for store, batch in stores
    ]
    for shared, plain in zip(*views, strict=True):
        names = sorted(plain.columns)
        assert sorted(shared.columns) == names
        assert stores[0][0].read(shared, names).equals(stores[1][0].read(plain, names))
        assert shared.prompt_lengths == plain.prompt_lengths
        assert {chunk.key for chunk in shared.chunks} <= {chunk.key for chunk in plain.chunks}
        assert BatchHandle.model_validate_json(shared.model_dump_json()) == shared


def test_a_view_of_samples_of_one_prompt_names_one_row_of_it() -> None:
    _, batch = put([rows_of([(0, 4), (1, 3)])], shared=True)
    prompts, others, _ = batch.groups
    assert (list(prompts.dtypes), prompts.chunks) == (
        ["prompt_ids", "prompt_experts", "prompt_text", "answer", "info"],
        others.chunks,
    )
    assert read_plan(prompts).start.tolist() == [0, 0, 0, 0, 4, 4, 4]
    some = select(batch, [5, 2, 6]).groups[0]
    assert (read_plan(some).start.tolist(), some.chunks) == ([4, 0, 4], prompts.chunks)
    joined = concat(split(batch, [2, 5]))
    assert joined.groups[0] == prompts


def test_rows_that_differ_in_any_column_of_the_prompt_share_nothing() -> None:
    rows = rows_of([(2, 3)])
    for name, values in {
        "info": pa.array(['{"a": 1}', '{"a": 2}', '{"a": 1}']),
        "prompt_experts": jagged(np.arange(18, dtype=np.uint8).reshape(9, 2), np.array([3, 3, 3])),
    }.items():
        other = rows.set_column(rows.schema.get_field_index(name), name, values)
        assert share_prompts(other) is other


def test_rows_of_one_sample_each_are_stored_as_they_are_in_one_group() -> None:
    rows = rows_of([(0, 1), (1, 1), (2, 1)])
    assert share_prompts(rows) is rows
    assert len(put([rows], shared=True)[1].groups) == len(put([rows], shared=False)[1].groups) == 2


def test_bytes_of_the_prompts_of_a_step() -> None:
    """Eight samples of each of 64 prompts: their prompts take an eighth of the bytes, and nothing else changes."""
    rows = rows_of([(group, 8) for group in range(64)], width=64)
    shared = share_prompts(rows)
    names = [name for name in rows.schema.names if column_spec(name).is_of_prompt]
    values = sum(row_bytes(rows, name) for name in names)
    assert sum(row_bytes(shared, name) for name in names) * 8 == values
    saved = encoded_bytes(rows) - encoded_bytes(shared)
    assert abs(saved - values * 7 // 8) <= 64 * len(names)  # what the buffers are padded to
    per_row = [
        len(put([each], shared=each is shared)[1].groups[0].segments.model_dump_json()) / rows.num_rows
        for each in (rows, shared)
    ]
    assert per_row[1] - per_row[0] < 3  # two bytes in base64 for up to 65,536 rows


def row_bytes(rows: pa.RecordBatch, name: str) -> int:
    """The bytes of a column's values, without row offsets."""
    column = rows[name]
    if pa.types.is_string(column.type):
        return sum(len(text.encode()) for text in column.to_pylist())
    return int(column.flatten().flatten().nbytes if column_spec(name).is_vector else column.flatten().nbytes)
