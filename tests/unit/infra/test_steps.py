"""A step that is opened again: what its committed stages have put is kept, the rest is deleted."""

import asyncio
import logging
import threading
from pathlib import Path

import pytest

from infra.ray.ranks import WorkerGroup
from infra.storage.ledger import stage_key, step_folder
from infra.stores.chunk_files import open_path
from infra.stores.chunk_index import MemoryStore
from infra.stores.files import FsspecColumnStore
from infra.stores.open import open_store
from infra.stores.step_columns import close_other_steps, open_step, sweep_steps
from infra.stores.tiered import TieredColumnStore
from schemas.batch import BatchHandle, ChunkKey
from schemas.config.runtime import TimeoutsConfig
from schemas.errors import CapacityError
from schemas.step import PolicyHandle, RunHandle
from tasks import operations
from tests.support.small_run import make_small_run, put_advantages, put_behavior, put_rollout, rollout_columns

STEP = 4
STAGES = {"rollout": "", "put": "rollout", "logprob": "behavior", "advantage": "advantage"}  # and their chunks
POLICY = PolicyHandle(run_id="demo", version=STEP, incarnation="w")


@pytest.fixture
def run(tmp_path: Path) -> RunHandle:
    """A run with all columns of a step that was not finished; its stages are in the ledger."""
    directory = make_small_run(tmp_path, kind="fsspec")
    run = RunHandle(
        run_id="demo", identity="demo", directory=str(directory.path), config=directory.config(), store_incarnation="s"
    )
    for stage in STAGES:
        entry = directory.path / "ledger" / stage_key(run, POLICY, stage)
        entry.parent.mkdir(exist_ok=True)
        entry.write_text("{}")
    store = columns(run)
    store.open(STEP)
    store.save_batch(put_advantages(store, put_behavior(store, put_rollout(store, STEP))))
    return run


def columns(run: RunHandle) -> FsspecColumnStore:
    store = open_store(run)
    assert isinstance(store, FsspecColumnStore)
    return store


def kept(run: RunHandle) -> tuple[set[str], BatchHandle | None]:
    """Return the stages of the chunks that are left after the step is opened, and its handle."""
    open_step(run, POLICY)
    store = columns(run)
    return {ChunkKey.parse(ref.key).stage for ref in store.chunks(STEP)}, store.load_batch(STEP)


def changed(run: RunHandle, **runtime: object) -> RunHandle:
    return run.replace(config=run.config.replace(runtime=run.config.runtime.replace(**runtime)))


def test_a_change_of_limits_keeps_all_columns(run: RunHandle) -> None:
    before = columns(run).load_batch(STEP)
    assert kept(run.replace(config=run.config.replace(timeouts=TimeoutsConfig(worker_seconds=7)))) == (
        {"rollout", "behavior", "advantage"},
        before,
    )


def test_other_ranks_keep_the_rows_and_score_them_again(run: RunHandle) -> None:
    other = changed(run, num_policy_ranks=2)
    stages, batch = kept(other)
    assert stages == {"rollout"}
    assert batch is not None
    assert "prompt_ids" in batch.columns
    assert not {"behavior_logprobs", "advantages"} & set(batch.columns)
    store = columns(other)
    chunk = put_behavior(store, put_rollout(store, STEP)).chunks[-1]  # the same key is free again
    assert ChunkKey.parse(chunk.key).stage == "behavior"


@pytest.mark.parametrize("committed", [("rollout",), ("rollout", "put"), ("rollout", "put", "logprob")])
def test_what_a_killed_stage_has_put_is_deleted(run: RunHandle, committed: tuple[str, ...]) -> None:
    ledger = Path(run.directory, "ledger")
    for stage in STAGES.keys() - committed:
        (ledger / stage_key(run, POLICY, stage)).unlink()
    stages, batch = kept(run)
    assert stages == {STAGES[stage] for stage in committed[1:]}
    assert (batch is None) == (committed == ("rollout",))
    assert (ledger / stage_key(run, POLICY, "rollout")).exists()


def test_a_step_whose_columns_are_lost_is_run_again_from_its_start(
    run: RunHandle, caplog: pytest.LogCaptureFixture
) -> None:
    columns(run).clear(STEP)
    with caplog.at_level(logging.WARNING):
        assert kept(run) == (set(), None)
    assert "step 4 is run again from its start: its columns are no longer in the store" in caplog.text
    assert not list(Path(run.directory, "ledger").glob("step-000004/*"))


@pytest.mark.parametrize("content", [None, "", "\0" * 8, '{"metadata": {'], ids=["lost", "empty", "zeros", "cut off"])
def test_a_step_that_has_lost_its_rollouts_entry_is_run_again_from_its_start(
    run: RunHandle, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Else its rollout alone would be run again, and its rewards joined with the rows of the earlier one."""
    entry = Path(run.directory, "ledger", stage_key(run, POLICY, "rollout"))
    entry.unlink()
    if content is not None:
        entry.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert kept(run) == (set(), None)
    assert "step 4 is run again from its start: the ledger has lost the rollout that its rows are of" in caplog.text
    assert not list(Path(run.directory, "ledger").glob("step-000004/*"))


@pytest.mark.parametrize("stage", ["put", "logprob", "advantage"])
def test_a_stage_whose_entry_was_cut_off_is_not_committed(run: RunHandle, stage: str) -> None:
    entry = Path(run.directory, "ledger", stage_key(run, POLICY, stage))
    entry.write_text('{"metadata": {')
    stages, _ = kept(run)
    assert STAGES[stage] not in stages
    assert len(stages) == {"put": 0, "logprob": 2, "advantage": 2}[stage]


@pytest.mark.parametrize("damage", ["lost", "damaged"])
@pytest.mark.parametrize("stage", ["rollout", "behavior", "advantage"])
def test_a_step_with_a_bad_chunk_is_run_again_from_its_start(
    run: RunHandle, stage: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = next(Path(run.directory).glob(f"columns/step-000004/{stage}-0-0.*.arrow"))
    if damage == "lost":
        file.unlink()
    else:
        file.write_bytes(b"x" * file.stat().st_size)
    with caplog.at_level(logging.WARNING):
        assert kept(run) == (set(), None)
    assert f"step 4 is run again from its start: chunk demo/4/{stage}/0/0" in caplog.text
    assert not list(Path(run.directory, "ledger").glob("step-000004/*"))


def test_a_step_whose_record_is_damaged_is_run_again_from_its_start(run: RunHandle) -> None:
    record = Path(run.directory, "columns", step_folder(STEP), "rollout-0-0.json")
    record.write_bytes(record.read_bytes()[:40])
    assert kept(run) == (set(), None)
    assert not record.exists()
    assert not list(Path(run.directory, "ledger").glob("step-000004/*"))


def test_a_run_that_goes_back_does_not_wait_for_the_step_that_a_killed_driver_left_open(run: RunHandle) -> None:
    store = columns(run)
    held, before = store.usage().num_bytes, store.load_batch(STEP)
    store._capacity_bytes, store._put_timeout = held + held // 2, 0
    store.clear(STEP - 2)  # from which the run goes on, as the policy was lost
    store.open(STEP - 2)
    with pytest.raises(CapacityError):
        put_rollout(store, STEP - 2)
    close_other_steps(run, STEP - 2)
    assert store.open_steps() == [STEP - 2]
    put_rollout(store, STEP - 2)
    assert kept(run) == ({"rollout", "behavior", "advantage"}, before)  # once it is that step's turn


@pytest.mark.parametrize(("step", "left"), [(STEP, [STEP]), (STEP - 1, []), (STEP - 2, [])])
def test_a_resumed_run_closes_the_steps_that_it_does_not_go_on_with(run: RunHandle, step: int, left: list[int]) -> None:
    close_other_steps(run, step)
    assert columns(run).open_steps() == left


def test_responses_that_are_begun_ahead_stay_open(run: RunHandle) -> None:
    store = columns(run)
    store.open(STEP + 1)
    begun = ChunkKey(run_id="demo", step=STEP + 1, stage="partial", shard=0, attempt=1)
    store.put(begun, rollout_columns(STEP + 1, 0))
    for _ in range(2):
        close_other_steps(run, STEP)
        assert store.open_steps() == [STEP, STEP + 1]
    close_other_steps(run, STEP - 1)
    assert store.open_steps() == []
    assert [ref.key for ref in store.chunks(STEP + 1)] == [str(begun)]


@pytest.mark.parametrize(("keep_steps", "left"), [(1, [3, 4]), ("all", [2, 3, 4])])
def test_a_sweep_keeps_the_last_steps_or_all(run: RunHandle, keep_steps: int | str, left: list[int]) -> None:
    kept_run = run.replace(config=run.config.replace(store=run.config.store.replace(keep_steps=keep_steps)))
    sweep_steps(kept_run, STEP)
    assert columns(run).steps() == left
    assert columns(run).usage().open_steps == (STEP,)
    sweep_steps(kept_run, STEP + 1)
    assert columns(run).steps() == ([4] if keep_steps == 1 else left)
    assert columns(run).usage().open_steps == ()  # it was closed, its ledger entries are gone
    assert not (Path(run.directory) / "ledger" / stage_key(run, POLICY, "put")).exists()


def test_a_checkpoint_sweeps_steps_while_the_event_loop_goes_on(
    run: RunHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def retain(*_: object) -> int:
        return STEP + 1

    threads: list[threading.Thread] = []
    monkeypatch.setattr(operations, "call", retain)
    monkeypatch.setattr(
        operations, "sweep_steps", lambda *args: threads.append(threading.current_thread()) or sweep_steps(*args)
    )
    assert columns(run).steps() == [STEP - 2, STEP - 1, STEP]
    assert asyncio.run(operations.drop_superseded(run, WorkerGroup({"policy": None}, lambda: False), [])) == STEP + 1
    assert columns(run).steps() == [STEP - 1, STEP]
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize("is_tiered", [False, True])
def test_a_sweep_removes_what_killed_writers_have_left_in_a_step_that_stays(run: RunHandle, is_tiered: bool) -> None:
    folder, store = Path(run.directory, "columns", step_folder(STEP)), columns(run)
    whole = sorted(folder.iterdir())
    (folder / ".5e2f.tmp").write_bytes(b"a part of a chunk")
    (folder / "behavior-1-0.5e2f.arrow").write_bytes(b"of a chunk that was not committed")
    if is_tiered:
        TieredColumnStore(MemoryStore("demo", 2**20, store.incarnation), store).drop_leftovers(STEP)
    else:
        kept_store = run.config.store.replace(keep_steps="all")
        sweep_steps(run.replace(config=run.config.replace(store=kept_store)), STEP + 1)
    assert sorted(folder.iterdir()) == whole
    batch = store.load_batch(STEP)
    assert batch is not None
    store.verify(batch)


def test_a_sweep_leaves_a_step_whose_record_is_damaged_as_it_is(run: RunHandle) -> None:
    folder = Path(run.directory, "columns", step_folder(STEP))
    (folder / "behavior-0-0.json").write_text("{")
    before = sorted(folder.iterdir())
    sweep_steps(run.replace(config=run.config.replace(store=run.config.store.replace(keep_steps="all"))), STEP + 1)
    assert sorted(folder.iterdir()) == before


def test_the_files_of_kept_steps_are_not_looked_at_by_a_put(run: RunHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    store = columns(run)
    seen: list[str] = []
    for name in ("read", "size", "sizes"):
        own = getattr(store._folder, name)
        monkeypatch.setattr(store._folder, name, lambda path="", own=own: seen.append(path) or own(path))
    store.open(STEP)
    put_rollout(store, STEP)
    assert open_path(STEP) in seen
    assert {path.split("/")[0] for path in seen} == {"open", step_folder(STEP)}
