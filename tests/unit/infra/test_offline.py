"""Reading a step's columns from the files of a small run."""

from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest

from infra.storage.runs import RunDirectory
from infra.stores.offline import read_step
from schemas.errors import ChunkCorruptedError, ColumnNotFoundError, RunError
from tests.support.small_run import (
    ADVANTAGES,
    DTYPES,
    LOGPROBS,
    SAMPLES,
    TRAINED,
    columns_of,
    make_small_run,
    put_rollout,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_small_run(tmp_path)


def test_rows_are_those_of_the_batch_in_its_order(run: RunDirectory) -> None:
    table = read_step(run.path, 3)
    assert isinstance(table, pa.Table)
    assert table.column_names == [*DTYPES, "behavior_logprobs", "advantages"]
    assert table["response_text"].to_pylist() == [SAMPLES[row][1] for row in TRAINED]
    assert table["advantages"].to_pylist() == list(ADVANTAGES)
    assert [values[0] for values in table["behavior_logprobs"].to_pylist()] == [LOGPROBS[row] - 0.25 for row in TRAINED]
    assert table["response_ids"].type == pa.large_list(pa.uint16())
    assert table["policy_version"].to_pylist() == [3] * 5


def test_all_columns_go_into_pandas_polars_and_duckdb(run: RunDirectory) -> None:
    table = read_step(run.path)
    frame = table.to_pandas()
    assert frame["loss_mask"].map(sum).tolist() == [4, 3, 5, 4, 12]
    assert frame["response_ids"][0].tolist() == [*b"tac", 256]
    polars_frame = pl.from_arrow(table)
    assert isinstance(polars_frame, pl.DataFrame)
    assert polars_frame["response_ids"].dtype == pl.List(pl.UInt16)
    assert polars_frame.to_arrow().to_pylist() == table.to_pylist()
    rows = duckdb.from_arrow(table).fetchall()
    assert [dict(zip(table.column_names, row, strict=True)) for row in rows] == table.to_pylist()


def test_columns_are_in_the_requested_order(run: RunDirectory) -> None:
    table = read_step(str(run.path), 2, ["reward", "group_id"])
    assert table.to_pydict() == {"reward": [1.0, 0.5, 1.0, 0.5, 0.0], "group_id": [0, 0, 1, 1, 1]}


def test_the_newest_step_that_has_a_batch(run: RunDirectory, tmp_path: Path) -> None:
    store = columns_of(run)
    store.open(4)
    batch = put_rollout(store, 4)
    assert read_step("demo", runs_dir=str(tmp_path / "runs"))["policy_version"][0].as_py() == 3
    with pytest.raises(RunError, match="step 4 of run demo has chunks, but no batch before its put stage is done"):
        read_step(run.path, 4)
    store.save_batch(batch)
    table = read_step(run.path)
    assert table["policy_version"].to_pylist() == [4] * 6
    assert table["reward"].null_count == 1
    for step in (2, 3, 4):
        store.clear(step)
    with pytest.raises(RunError, match="run demo has no step with columns"):
        read_step(run.path)
    store.open(5)
    put_rollout(store, 5)
    with pytest.raises(RunError, match="step 5 has its first chunks, but no batch yet"):
        read_step(run.path)


def test_missing_columns_and_steps_are_rejected(run: RunDirectory) -> None:
    with pytest.raises(ColumnNotFoundError, match="reference_logprobs"):
        read_step(run.path, 3, ["reference_logprobs"])
    with pytest.raises(RunError, match="steps that have: 2, 3"):
        read_step(run.path, 4)
    with pytest.raises(ValueError, match="must name at least one column"):
        read_step(run.path, 3, [])


def test_a_damaged_file_is_never_served(run: RunDirectory) -> None:
    next((run.path / "columns" / "step-000003").glob("advantage-0-0.*.arrow")).write_bytes(b"")
    assert read_step(run.path, 3, ["reward"]).num_rows == 5
    with pytest.raises(ChunkCorruptedError, match="demo/3/advantage/0/0"):
        read_step(run.path, 3)
