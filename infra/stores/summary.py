"""Summaries of a step's columns, as `sluice inspect` shows them.

N rows of a batch, S of them shown as samples.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from infra.stores.offline import StoredColumns, steps_with_columns
from rl_core.columns.codec import value_dtypes
from rl_core.columns.jagged import is_jagged, row_lengths
from rl_core.columns.prompts import rows_of_prompts
from rl_core.views import decode_ints, new_batch, select
from schemas.batch import BatchHandle, ChunkKey, ChunkRef, ColumnGroup
from schemas.catalog import REWARD_PART_PREFIX, column_spec
from schemas.errors import ColumnError, StoreError
from schemas.summary import ChunkSummary, ColumnStats, ColumnSummary, LengthHistogram, SampleRow, StepSummary

NUM_BINS = 10
LOG_BINS_FROM = 20  # ratio of the longest to the shortest from which bins of growing width show more


def length_histogram(lengths: npt.NDArray[np.int64]) -> LengthHistogram | None:
    """Count `lengths`, [N], in at most `NUM_BINS` bins: of equal width or, if they differ a lot, of growing width."""
    if not lengths.size:
        return None
    low, stop = int(lengths.min()), int(lengths.max()) + 1
    if stop > LOG_BINS_FROM * max(low, 1):
        cuts = np.geomspace(low + 1, stop + 1, NUM_BINS + 1) - 1
    else:
        cuts = np.linspace(low, stop, NUM_BINS + 1)
    edges = np.unique(np.rint(cuts).astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    return LengthHistogram(edges=tuple(edges.tolist()), num_rows=tuple(counts.tolist()))


def summarize_values(column: pa.Array) -> ColumnStats:
    """Return the statistics of one column of N rows."""
    values = column.flatten() if is_jagged(column) else column
    if pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    counts = {
        "num_rows": len(column),
        "num_values": len(values),
        "num_bytes": column.nbytes,
        "num_nulls": values.null_count,
    }
    if pa.types.is_string(values.type):
        return ColumnStats(**counts, num_nonfinite=0)
    known = values.drop_null()
    finite = known.filter(pc.is_finite(known)) if pa.types.is_floating(known.type) else known
    counts["num_nonfinite"] = len(known) - len(finite)
    if not len(finite):
        return ColumnStats(**counts)
    extremes = pc.min_max(finite)
    return ColumnStats(
        **counts,
        minimum=extremes["min"].as_py(),
        mean=pc.mean(finite).as_py(),
        maximum=extremes["max"].as_py(),
    )


def summarize_step(
    store: StoredColumns,
    step: int,
    num_samples: int,
    *,
    failed: bool = False,
    reasons: Mapping[str, str] | None = None,
) -> tuple[StepSummary, list[StoreError]]:
    """Read a step's columns once; return their summary, and the errors of columns and chunks that can't be read.

    Args:
        store: The run's files.
        step: A step that has columns.
        num_samples: S; all N rows if the batch has fewer.
        failed: Summarize the rows whose reward failed, which are not trained on, instead of the others.
        reasons: Why rewards failed, by sample id.

    Raises:
        ChunkCorruptedError: The step's saved handle is damaged.
    """
    failures: list[StoreError] = []
    saved = store.load_batch(step)
    refs = _committed_chunks(store, step, failures)
    batch = _batch_of_chunks(store, step, refs, failures) if failed or saved is None else saved
    if failed and batch:
        batch = select(batch, np.flatnonzero(store.read(batch, ["reward"]).column(0).is_null()))
    columns, samples = _summarize_rows(store, batch, num_samples, failures, reasons or {}) if batch else ((), ())
    summary = StepSummary(
        run_id=store.run_id,
        step=step,
        steps=tuple(steps_with_columns(store)),
        has_batch=saved is not None,
        policy_version=batch.policy_version if batch else None,
        num_rows=batch.num_rows if batch else 0,
        num_rows_put=sum(chunk.num_rows for group in batch.groups[:1] for chunk in group.chunks) if batch else 0,
        columns=columns,
        chunks=_summarize_chunks(batch, refs),
        prompt_tokens=length_histogram(decode_ints(batch.prompt_lengths)) if batch else None,
        response_tokens=length_histogram(decode_ints(batch.response_lengths)) if batch else None,
        samples=samples,
        errors=tuple(dict.fromkeys(_line(failure) for failure in failures)),
    )
    return summary, failures


def _committed_chunks(store: StoredColumns, step: int, failures: list[StoreError]) -> list[ChunkRef]:
    """Return the step's committed chunks, by stage and shard."""
    try:
        refs = [record.ref for record in store.records(step)]
    except StoreError as error:
        failures.append(error)
        return []
    return sorted(refs, key=_sort_key)


def _sort_key(ref: ChunkRef) -> tuple[str, int, int]:
    key = ChunkKey.parse(ref.key)
    return key.stage, key.shard, key.attempt


def _batch_of_chunks(
    store: StoredColumns, step: int, refs: Sequence[ChunkRef], failures: list[StoreError]
) -> BatchHandle | None:
    """Return a batch of the token chunks so far, for a step whose handle isn't saved yet."""
    chunks: dict[tuple[str, int], tuple[ChunkRef, pa.RecordBatch]] = {}  # the last attempt of each shard
    for ref in refs:
        try:
            columns = store.read_chunk(ref)
        except StoreError as error:
            failures.append(error)
            continue
        if {"prompt_ids", "response_ids"} <= set(columns.schema.names):
            chunks[_sort_key(ref)[:2]] = ref, columns
    found = list(chunks.values())
    dtypes = value_dtypes(found[0][1]) if found else {}
    alike = [(ref, columns) for ref, columns in found if value_dtypes(columns) == dtypes]
    if not alike:
        return None
    prompts, responses = (
        pa.chunked_array([columns[name] for _, columns in alike]).combine_chunks()
        for name in ("prompt_ids", "response_ids")
    )
    rows = rows_of_prompts(prompts)
    lengths = row_lengths(prompts)[rows], row_lengths(responses)
    # Step k is sampled by version k of the policy.
    return new_batch(store.run_id, step, step, [ref for ref, _ in alike], dtypes, *lengths, rows)


def _summarize_rows(
    store: StoredColumns,
    batch: BatchHandle,
    num_samples: int,
    failures: list[StoreError],
    reasons: Mapping[str, str],
) -> tuple[tuple[ColumnSummary, ...], tuple[SampleRow, ...]]:
    """Read each column of the batch once; return the columns' summaries and the sample rows."""
    rows = _sample_rows(batch.num_rows, num_samples)
    columns: list[ColumnSummary] = []
    sampled: dict[str, pa.Array] = {}
    chunks = list(dict.fromkeys(group.chunks for group in batch.groups))
    for group in batch.groups:
        at = chunks.index(group.chunks)
        for name, column in _read_group(store, batch, group):
            columns.append(_summarize_column(name, at, group, column))
            if isinstance(column, StoreError):
                failures.append(column)
            else:
                sampled[name] = column.take(pa.array(rows))
    lengths = [
        (int(prompt), int(response))
        for prompt, response in zip(
            decode_ints(batch.prompt_lengths)[rows], decode_ints(batch.response_lengths)[rows], strict=True
        )
    ]
    samples = (_sample(at, row, lengths[at], sampled, reasons) for at, row in enumerate(rows.tolist()))
    return tuple(columns), tuple(samples)


def _read_group(
    store: StoredColumns, batch: BatchHandle, group: ColumnGroup
) -> Iterator[tuple[str, pa.Array | StoreError]]:
    """Yield the group's columns; if they can't be read together, read each alone, and yield its error if that fails."""
    try:
        together = store.read(batch, list(group.dtypes))
    except StoreError:
        for name in group.dtypes:
            try:
                yield name, store.read(batch, [name]).column(0)
            except StoreError as error:
                yield name, error
    else:
        yield from zip(group.dtypes, together.columns, strict=True)


def _summarize_column(name: str, at: int, group: ColumnGroup, column: pa.Array | StoreError) -> ColumnSummary:
    spec = column_spec(name) if _is_declared(name) else None
    failed = isinstance(column, StoreError)
    stages = dict.fromkeys(ChunkKey.parse(chunk.key).stage for chunk in group.chunks)
    return ColumnSummary(
        name=name,
        stage=", ".join(stages),
        group=at,
        axis=spec.axis if spec else None,
        dtype=group.dtypes[name],
        unit=spec.unit if spec else "",
        stats=None if failed else summarize_values(column),
        error=_line(column) if failed else None,
    )


def _summarize_chunks(batch: BatchHandle | None, committed: Sequence[ChunkRef]) -> tuple[ChunkSummary, ...]:
    used = dict.fromkeys(batch.chunks if batch else ())
    return tuple(
        ChunkSummary(key=ref.key, num_rows=ref.num_rows, num_bytes=ref.num_bytes, in_batch=ref in used)
        for ref in dict.fromkeys([*used, *committed])
    )


def _sample_rows(num_rows: int, num_samples: int) -> npt.NDArray[np.int64]:
    """Return the samples' row numbers, [S]: equally spaced, from the first row on."""
    count = min(num_rows, num_samples)
    return np.arange(count, dtype=np.int64) * num_rows // max(count, 1)


def _sample(
    at: int, row: int, lengths: tuple[int, int], sampled: dict[str, pa.Array], reasons: Mapping[str, str]
) -> SampleRow:
    """Return row `row` of the batch, which is row `at` of the sampled columns, [S] each."""
    values = {name: column[at].as_py() for name, column in sampled.items() if column_spec(name).axis == "row"}
    trained = sampled["loss_mask"][at].values if "loss_mask" in sampled else None  # an environment's tokens don't count
    return SampleRow(
        row=row,
        prompt_tokens=lengths[0],
        response_tokens=lengths[1],
        group_id=values.get("group_id"),
        prompt_text=values.get("prompt_text"),
        response_text=values.get("response_text"),
        answer=values.get("answer"),
        finish_reason=values.get("finish_reason"),
        reward=values.get("reward"),
        failure=reasons.get(values.get("sample_id", "")) if values.get("reward") is None else None,
        reward_parts={name: value for name, value in values.items() if name.startswith(REWARD_PART_PREFIX)},
        advantages=values.get("advantages"),
        mean_logprobs={
            name: pc.mean(column[at].values if trained is None else column[at].values.filter(trained)).as_py()
            for name, column in sampled.items()
            if name.endswith("_logprobs")
        },
    )


def _line(error: StoreError) -> str:
    return f"{type(error).__name__}: {error}"


def _is_declared(name: str) -> bool:
    try:
        column_spec(name)
    except ColumnError:
        return False
    return True
