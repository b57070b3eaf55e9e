"""The differences of two runs."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from infra.history.diff import Difference, StepDiff, compare_columns, diff_runs
from infra.storage.runs import RunDirectory
from infra.stores.files import FsspecColumnStore
from rl_core.columns.codec import value_dtypes
from rl_core.columns.jagged import jagged
from rl_core.views import select, with_column
from schemas.batch import ChunkKey
from schemas.errors import ChunkCorruptedError, RunError
from schemas.step import StepReport
from tests.support.small_run import columns_of, make_small_run, put_rollout, replace_advantages

COMMON = {"seconds": 1.0, "seconds_by_phase": {}}


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunDirectory, RunDirectory]:
    return make_small_run(tmp_path, "a"), make_small_run(tmp_path, "b")


def compared(a: RunDirectory, b: RunDirectory) -> list[StepDiff]:
    return list(diff_runs(a, b))


def test_equal_runs_are_compared_by_their_digests(
    runs: tuple[RunDirectory, RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FsspecColumnStore, "_fetch", lambda *_: pytest.fail("columns were read"))
    assert compared(*runs) == [StepDiff(step=step, stages=(), has_columns=True) for step in (2, 3)]


def test_the_first_different_value_is_found(runs: tuple[RunDirectory, RunDirectory]) -> None:
    a, b = runs
    replace_advantages(a, 2, [0.25, 0.5, 0.75, 0, 0])
    replace_advantages(b, 2, [0.25, 0.625, 1.0, 0, 0])
    first, second = compared(a, b)
    assert [stage.stage for stage in first.stages] == ["advantage"]
    assert first.stages[0].differences == (
        Difference(
            column="advantages",
            closeness="differs",
            row=1,
            a="0.5",
            b="0.625",
            num_different=2,
            num_compared=5,
            largest=0.25,
        ),
    )
    assert first.closeness == "differs"
    assert second.stages == ()


def test_equal_rows_of_other_chunks_are_the_same(runs: tuple[RunDirectory, RunDirectory]) -> None:
    a, b = runs
    store = columns_of(b)
    batch = store.load_batch(3)
    assert batch is not None
    store.open(3)
    columns, bare = store.read(batch, batch.columns), batch.replace(groups=())
    chunk = store.put(ChunkKey(run_id="b", step=3, stage="rollout", shard=7), columns, bare)
    store.save_batch(with_column(bare, value_dtypes(columns), [chunk], range(batch.num_rows)))
    assert compared(a, b)[1].stages == ()


def test_other_rows_of_the_same_chunks_are_a_difference(runs: tuple[RunDirectory, RunDirectory]) -> None:
    a, b = runs
    store = columns_of(b)
    batch = store.load_batch(2)
    assert batch is not None
    store.save_batch(select(batch, (1, 0, 2, 3, 4)))  # the first two rows have changed places
    first, second = compared(a, b)
    differences = {found.column: found for stage in first.stages for found in stage.differences}
    assert {"response_ids", "reward", "behavior_logprobs", "advantages"} <= differences.keys()
    reward, advantage = differences["reward"], differences["advantages"]
    assert (reward.row, reward.a, reward.b, reward.num_different) == (0, "1", "0.5", 2)
    assert (advantage.row, advantage.a, advantage.b, advantage.num_different) == (0, "0.25", "-0.25", 2)
    assert second.stages == ()


def test_columns_and_steps_that_only_one_run_has(runs: tuple[RunDirectory, RunDirectory], tmp_path: Path) -> None:
    a, b = runs
    columns_of(b).clear(2)
    store = columns_of(b)
    store.clear(3)
    store.open(3)
    store.save_batch(select(put_rollout(store, 3), (0, 1, 3, 4, 5)))
    (step,) = compared(a, b)
    assert [(stage.stage, [found.column for found in stage.differences]) for stage in step.stages] == [
        ("behavior", ["behavior_logprobs"]),
        ("advantage", ["advantages"]),
    ]
    assert (step.stages[0].differences[0].a, step.stages[0].differences[0].b) == ("present", "missing")
    columns_of(b).clear(3)
    with pytest.raises(RunError, match="runs a and b have no finished step in common"):
        compared(a, b)


def test_plans_and_metrics_are_compared_without_times_and_without_columns(
    runs: tuple[RunDirectory, RunDirectory],
) -> None:
    a, b = runs
    for run, plan, loss, seconds in ((a, "x", 0.5, 1.0), (b, "y", 0.5 + 2e-7, 2.0)):
        metrics = {"loss": loss, "update_seconds": seconds, "kl": float("nan")}
        run.metrics.append_step(StepReport(step=0, policy_version=1, metrics=metrics, plan=plan, **COMMON))
        run.metrics.append_step(StepReport(step=1, policy_version=2, metrics={"loss": loss}, plan="z", **COMMON))
    first, second, *_ = compared(a, b)
    assert not first.has_columns
    assert [(stage.stage, stage.closeness) for stage in first.stages] == [
        ("plan", "differs"),
        ("metrics", "within 1e-6"),
    ]
    assert [found.column for found in first.stages[1].differences] == ["loss"]
    assert second.closeness == "within 1e-6"


def test_damaged_columns_are_no_difference(runs: tuple[RunDirectory, RunDirectory]) -> None:
    a, b = runs
    replace_advantages(b, 2, [0.5] * 5)
    chunk = next(a.path.glob("columns/step-000002/advantage-0-0.*.arrow"))
    chunk.write_bytes(b"x" * chunk.stat().st_size)
    with pytest.raises(ChunkCorruptedError, match="chunk a/2/advantage/0/0"):
        compared(a, b)


def test_values_of_a_column() -> None:
    def floats(*values: float | None) -> pa.Array:
        return pa.array(values, pa.float32())

    nan = float("nan")
    assert compare_columns("reward", floats(1, nan, None), floats(1, nan, None)) is None
    close = compare_columns("reward", floats(100, 0), floats(100.00001, 0))
    assert close is not None
    assert (close.row, close.closeness, close.num_different) == (0, "within 1e-6", 1)
    lost = compare_columns("reward", floats(1, None), floats(1, 0))
    assert lost is not None
    assert (lost.row, lost.a, lost.closeness) == (1, "None", "differs")
    widened = compare_columns("group_id", pa.array([1, 2], pa.uint16()), pa.array([1, 2], pa.int32()))
    assert widened is None
    texts = compare_columns("answer", pa.array(["a", "b", "c"]), pa.array(["a", "x"]))
    assert texts is not None
    assert (texts.row, texts.a, texts.b) == (1, "'b'", "'x'")
    fewer = compare_columns("answer", pa.array(["a", "b"]), pa.array(["a"]))
    assert fewer is not None
    assert (fewer.row, fewer.a, fewer.b) == (1, "2 rows", "1 rows")


def test_tokens_of_a_column() -> None:
    a = jagged(np.array([1, 2, 3, 4, 5, 6], np.int32), np.array([2, 0, 3, 1]))
    other = compare_columns("response_ids", a, jagged(np.array([1, 2, 3, 9, 5, 6], np.int32), np.array([2, 0, 3, 1])))
    assert other is not None
    assert (other.row, other.token, other.a, other.b, other.num_different) == (2, 1, "4", "9", 1)
    longer = compare_columns("response_ids", a, jagged(np.arange(1, 8, dtype=np.int32), np.array([2, 0, 4, 1])))
    assert longer is not None
    assert (longer.row, longer.token, longer.a, longer.b) == (2, 3, "3 values", "4 values")
    earlier = compare_columns("response_ids", a, jagged(np.array([1, 7, 3], np.int32), np.array([2, 0, 1])))
    assert earlier is not None
    assert (earlier.row, earlier.token, earlier.closeness) == (0, 1, "differs")
    assert compare_columns("response_ids", a, jagged(np.arange(1, 7, dtype=np.uint16), np.array([2, 0, 3, 1]))) is None
