"""What a replay reads of a run and compares, without workers: stored steps, versions, columns and weights."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from infra.checkpoints.store import CheckpointStore, open_checkpoints
from infra.datasets import PromptRow
from infra.engines.base import Generation
from infra.environments.slot import Reply
from infra.environments.trajectory import TrajectoryBuilder
from infra.history.past_weights import History
from infra.history.stored_step import StoredStep, is_scalar, shard_of, with_rewards
from infra.history.weights import compare_checkpoints, compare_updates, largest_shifts
from infra.storage.lineage import Fork, load_fork, save_fork
from infra.storage.runs import RunDirectory
from infra.stores.files import ReplayColumnStore
from infra.stores.offline import read_step
from infra.workers.samples import Sample, make_shard, to_columns
from infra.workers.sampling import ScoredResponse
from rl_core.columns.jagged import PREFIX_COLUMN, jagged
from rl_core.rewards import RewardOutcome
from schemas.batch import ChunkKey
from schemas.errors import ChunkCorruptedError, InvalidKeyError, RunError
from schemas.rollout import PER_ROW, make_sample_id
from schemas.step import StepReport
from tests.support.checkpoint_tensors import SHARD, save, tensors_of
from tests.support.small_run import END, SAMPLES, columns_of, make_small_run

PROMPT_IDS = np.array([5, 6, 7], dtype=np.int32)
LENGTHS = [4, 3, 8, 5, 4, 12]  # tokens of the responses of `SAMPLES`


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with four finished steps, of which it keeps the columns of 2 and 3."""
    directory = make_small_run(tmp_path)
    for step in range(4):
        report = StepReport(step=step, policy_version=step + 1, metrics={}, seconds=1.0, seconds_by_phase={})
        directory.metrics.append_step(report)
    return directory


def checkpoints_of(run: RunDirectory) -> CheckpointStore:
    return open_checkpoints(run, run.config().checkpoint)


def stored_step(run: RunDirectory) -> StoredStep:
    return StoredStep(run, columns_of(run), 3, run.metrics.step(3))


def test_a_stored_step_gives_the_rollouts_scalars_back(run: RunDirectory) -> None:
    stored = stored_step(run)
    rollout = stored.rollout
    read = stored.columns
    stored.release()
    assert stored.columns is not read
    assert stored.columns == read
    assert [shard.num_rows for shard in rollout.shards] == [3, 3]
    assert rollout.rewards == [reward for *_, reward, _ in SAMPLES]  # the failed one is among them
    assert rollout.group_ids == [group for group, *_ in SAMPLES]
    assert (list(rollout.response_lengths), list(rollout.loss_tokens)) == (LENGTHS, LENGTHS)
    assert rollout.truncated == [0, 0, 0, 0, 0, 1]
    assert rollout.reward_parts == ("letters",)
    assert (stored.rows.num_rows, stored.batch.num_rows) == (6, 5)
    assert stored.rows.columns == stored.batch.columns[: len(stored.rows.columns)]
    assert not stored.has_turns


def samples_of(has_turns: bool) -> list[Sample]:
    """`SAMPLES` as a rollout worker has them; an environment that answers makes a second turn of the last token.

    The one of the second sample branches.
    """
    samples = []
    for number, (group, text, reason, reward, letters) in enumerate(SAMPLES):
        ids = np.array([*text.encode(), *([END] if reason == "stop" else [])], dtype=np.int32)
        whole, first, last = (
            Generation(part, np.zeros(len(part), np.float32), reason) for part in (ids, ids[:-1], ids[-1:])
        )
        row = TrajectoryBuilder(number, PROMPT_IDS, 0, None)
        row.add_turn(first, text)
        row.add_answer(Reply(("no",), reward or 0.0))
        row.add_environment_tokens(np.array([7, 7]), parent=len(PROMPT_IDS) - 1 if number == 1 else len(row.tokens) - 1)
        row.add_turn(last, text)
        generation = row.finish("done" if reason == "stop" else "length") if has_turns else whole
        outcome = RewardOutcome(reward, {} if letters is None else {"letters": letters})
        response = ScoredResponse(generation, text, text, outcome)
        prompt = PromptRow(PROMPT_IDS, "", "", {}, "")
        samples.append(Sample(make_sample_id(3, group, number), group, prompt, response))
    return samples


@pytest.mark.parametrize("has_turns", [False, True])
def test_columns_tell_of_rows_what_their_worker_told(has_turns: bool) -> None:
    samples = samples_of(has_turns)
    told = make_shard(3, 0, 0, (0, 1), samples, {})
    columns = to_columns(samples, 3, END + 1, ["letters"])
    columns = columns.select([name for name in columns.schema.names if is_scalar(name)])  # what reused groups read
    stored = shard_of(0, columns, first_reused=1_000)
    for name in (*PER_ROW, "groups", "turn_rewards", "parts"):
        assert getattr(stored, name) == getattr(told, name), f"{name}: `shard_of` must give what `make_shard` gave"
    lacking = {name for name in PER_ROW if not getattr(told, name)}
    of_given_rows = {"prefixes", "prefix_lengths"}
    assert not has_turns or lacking == of_given_rows, "`make_shard` doesn't give these"


def test_columns_tell_what_rows_begin_with() -> None:
    columns = to_columns(samples_of(has_turns=False), 3, END + 1, ["letters"])
    lengths = [len(PROMPT_IDS) - row % 2 for row in range(columns.num_rows)]
    shard = shard_of(0, columns.append_column(PREFIX_COLUMN, pa.array(lengths, pa.int32())), 1_000)
    assert shard.prefix_lengths == lengths
    assert shard.prefixes == [row % 2 for row in range(columns.num_rows)]


def test_steps_of_0_3_0_have_turns_that_do_not_branch() -> None:
    batch = to_columns(samples_of(has_turns=True), 3, END + 1, ["letters"])
    names = [name for name in batch.schema.names if is_scalar(name)]
    now, then = (shard_of(0, batch.select(each), 1_000) for each in (names, sorted({*names} - {"turn_parents"})))
    assert sum(now.pairs_apart) > 0 == len(then.pairs_apart)
    assert now.num_turns == then.num_turns


def test_other_rewards_replace_those_of_all_shards(run: RunDirectory) -> None:
    rewards = [1.0, 2.0, 3.0, None, 5.0, 6.0]
    other = with_rewards(stored_step(run).rollout, rewards, {"length": rewards})
    assert other.rewards == rewards
    assert [len(shard.parts["length"]) for shard in other.shards] == [3, 3]


def test_versions_that_can_be_had_again(run: RunDirectory) -> None:
    with pytest.raises(RunError, match="finished 4 steps, so that it has no version 5 yet"):
        History(run).start(5)
    with pytest.raises(RunError, match=r"lacks the columns of steps 0 to 1.*versions that can be: 0;"):
        History(run).start(3)
    save(checkpoints_of(run), 2)
    history = History(run)
    assert history.possible_versions() == [0, 2, 3, 4]
    start = history.start(4)
    assert (start.version, start.has_checkpoint, [stored.step for stored in start.steps]) == (2, True, [2, 3])
    assert History(run).start(0).has_checkpoint is False
    with pytest.raises(RunError, match="doesn't keep the columns of step 1; steps whose columns it keeps: 2 to 3"):
        history.steps(1, 3)
    with pytest.raises(RunError, match="step 4 of run demo is not finished; finished, counted from 0: 0 to 3"):
        history.steps(3, 6)


def test_a_fork_at_step_0_begins_with_the_starting_weights(run: RunDirectory) -> None:
    save_fork(run, Fork(parent="runs/first", run_id="first", step=0, changes={}))
    assert History(run).possible_versions() == [0]
    assert History(run).start(0).has_checkpoint is False


def test_a_damaged_checkpoint_is_passed_over(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    store = checkpoints_of(run)
    save(store, 2)
    save(store, 3)
    (run.path / "policy" / "step-000003" / SHARD).write_bytes(b"x")
    assert History(run).start(3).version == 2
    assert "skipped a checkpoint" in caplog.text


def test_a_damaged_chunk_is_named(run: RunDirectory) -> None:
    chunk = next(run.path.glob("columns/step-000003/behavior-0-0.*.arrow"))
    chunk.write_bytes(b"x" * chunk.stat().st_size)
    with pytest.raises(ChunkCorruptedError, match="chunk demo/3/behavior/0/0"):
        History(run).steps(2, 4)


def test_a_fork_leads_to_its_parent(run: RunDirectory) -> None:
    assert load_fork(run) is None
    save_fork(run, Fork(parent="runs/first", run_id="first", step=3, changes={}))
    assert str(load_fork(run)) == "first@3"
    with pytest.raises(
        RunError, match=r"version 4 of run demo can't be had again: it has no checkpoint up to it, not even .* 3,"
    ):
        History(run).start(4)
    with pytest.raises(
        RunError, match=r"steps before 3 of run demo are those of run first, .* no longer in runs/first"
    ):
        read_step(run.path, 1)
    assert read_step(run.path, 3).num_rows == 5
    (run.path / "fork.json").write_text("{}")
    with pytest.raises(RunError, match=r"fork\.json is damaged"):
        load_fork(run)


def test_a_replay_reads_a_runs_columns_and_puts_its_own(run: RunDirectory, tmp_path: Path) -> None:
    source = columns_of(run)
    store = ReplayColumnStore("replay", str(tmp_path / "scratch"), source)
    stored = StoredStep(run, source, 3, run.metrics.step(3))
    assert store.read(stored.batch, ["advantages"]) == source.read(stored.batch, ["advantages"])
    store.open(3)
    before = sorted(run.path.rglob("*"))
    values = pa.record_batch({"advantages": pa.array([0.5] * 6, pa.float32())})
    ref = store.put(ChunkKey(run_id="replay", step=3, stage="advantage"), values, stored.rows)
    assert store.read_chunk(ref) == values
    assert sorted(run.path.rglob("*")) == before
    store.verify(stored.batch)
    with pytest.raises(InvalidKeyError, match="expected replay"):
        store.put(ChunkKey(run_id="other", step=3, stage="advantage"), values)


def test_weights_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    a, b, c = (CheckpointStore(str(tmp_path / name)) for name in "abc")
    save(a, 1)
    b.take_from(a, 1)
    assert compare_checkpoints(a, b, 1) == ()
    other = {**tensors_of(1), "model/b": torch.arange(5).to(torch.bfloat16) * 2, "model/c": torch.zeros(1)}
    c.save(1, other, num_updates=1, report=None).wait()
    found = {each.column: each for each in compare_checkpoints(a, c, 1)}
    assert found.keys() == {"model/b", "model/c"}
    assert (found["model/b"].num_different, found["model/b"].largest) == (4, 4.0)
    assert (found["model/c"].a, found["model/c"].b) == ("missing", "present")


def test_updates_are_compared_as_vectors(tmp_path: Path) -> None:
    a, b = (CheckpointStore(str(tmp_path / name)) for name in "ab")

    def write(store: CheckpointStore, version: int, *weights: float) -> None:
        tensors = {"model/a": torch.tensor(weights), "optimizer/exp_avg/a": torch.randn(2)}
        store.save(version, tensors, num_updates=version, report=None).wait()

    write(a, 3, 1.0, 1.0)
    write(a, 4, 2.0, 1.0)
    write(b, 3, 1.0, 1.0)
    write(b, 4, 3.0, 3.0)
    change = compare_updates(a, b, 3)
    assert change.cosine == pytest.approx(0.5**0.5)
    assert change.norm_ratio == pytest.approx(8**0.5)
    own = compare_updates(a, a, 3)  # as a tournament compares the run with itself
    assert (own.cosine, own.norm_ratio) == (1.0, 1.0)
    write(b, 4, 1.0, 1.0)
    assert compare_updates(a, b, 3).cosine is None


def test_the_tokens_that_move_most_are_trained_ones(run: RunDirectory) -> None:
    stored = stored_step(run)
    before = jagged(np.zeros(sum(LENGTHS), np.float32), np.array(LENGTHS))
    moved, less = (np.zeros(sum(LENGTHS), np.float32) for _ in range(2))
    moved[5], less[8], less[5] = -0.5, 1.0, 0.25  # token 1 of row 1, token 1 of row 2
    after = [jagged(values, np.array(LENGTHS)) for values in (moved, less)]
    texts = pa.array(["x", "y"])
    found = largest_shifts(stored, (before, after[0]), (before, after[1]), lambda ids: texts[: len(ids)], 2)
    assert [(move.row, move.token, move.a, move.b) for move in found] == [(2, 1, 0.0, 1.0), (1, 1, -0.5, 0.25)]
