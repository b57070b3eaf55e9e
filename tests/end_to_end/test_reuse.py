"""Steps that train on stored groups again, of their own run and of another one; killed, replayed and forked."""

import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import pytest

from infra.models.load import load_model
from infra.stores.offline import read_step
from schemas.config.model import ModelConfig
from tests.support.engine_checks import plain_logprobs
from tests.support.run_results import Run
from tests.support.tiny import make_tiny_model
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

STEPS, SAVED, MAX_AGE, NUM_PROMPTS, NUM_GROUPS = 5, 2, 2, 4, 3
PARTS = (
    *("train", "tiny.toml", "eval.every_steps=0", "correction.kind=truncated", f"data.reuse.num_groups={NUM_GROUPS}"),
    *("store.keep_steps=all", "rollout.batch_prompts=2", f"checkpoint.every_steps={SAVED}"),
)
WORKERS = "rollout.num_workers=2"  # of the runs that are killed, which changes no result
CONFIG = (*PARTS, f"steps={STEPS}", f"data.reuse.max_age={MAX_AGE}")
COPIED = ("sample_id", "policy_version", "prompt_ids", "response_ids", "loss_mask", "sampler_logprobs", "reward")
TURNS = (*COPIED, "turn_tokens", "turn_bridge_tokens", "turn_rewards", "episode_end")
STOPS = [*range(40), 259]  # a tiny model rarely ends a turn itself
GAME = """
class Asking:
    def __init__(self, task, seed):
        self._left = 3

    def reset(self):
        return "Begin."

    def step(self, action):
        self._left -= 1
        return f"{len(action)}?", 0.5, self._left == 0
"""


@pytest.fixture(scope="module")
def expected(workplace: Workplace) -> Run:
    """An undisturbed run."""
    workplace.sluice(*CONFIG, "--run-id", "reuse")
    return workplace.run("reuse")


def test_a_step_has_whole_groups_of_stored_steps_as_they_were(expected: Run) -> None:
    for step in range(STEPS):
        groups = list(_reused(expected, step))
        ages = {step - source for source, _, _ in groups}
        assert not groups if step == 0 else 0 < len(groups) <= NUM_GROUPS and ages <= set(range(1, MAX_AGE + 1))
        for source, group, rows in groups:
            stored = [row for row in _rows(expected, source) if row["group_id"] == group]
            assert [{name: row[name] for name in COPIED} for row in rows] == [
                {name: row[name] for name in COPIED} for row in stored
            ]
            assert len({row["reward"] for row in rows}) > 1
            assert {row["policy_version"] for row in rows} == {source}


def test_metrics_tell_reused_rows_from_sampled_ones(expected: Run) -> None:
    for step, metrics in enumerate(expected.step_metrics()):
        reused = list(_reused(expected, step))
        sampled = [row for row in _rows(expected, step) if row["group_id"] < NUM_PROMPTS]
        assert metrics["reward"] == pytest.approx(sum(row["reward"] for row in sampled) / len(sampled))
        assert metrics["response/tokens"] == sum(len(row["response_ids"]) for row in sampled) / len(sampled)
        assert metrics["reuse/groups"] == len(reused)
        ages = [step - source for source, _, rows in reused for _ in rows]
        assert metrics["reuse/rows"] == len(ages)
        assert metrics.get("reuse/age") == (pytest.approx(sum(ages) / len(ages)) if ages else None)
        lags = [step - row["policy_version"] for row in _rows(expected, step) for _ in row["response_ids"]]
        assert metrics["rollout/staleness"] == pytest.approx(sum(lags) / len(lags))
        assert (metrics["mismatch/max"] > 1e-4) == bool(reused)  # what it samples itself is on-policy
        assert "correction/weight" in metrics


def test_killed_and_back_at_an_older_checkpoint_it_ends_in_the_same_weights(
    workplace: Workplace, expected: Run
) -> None:
    run = workplace.run("reuse-killed")
    driver = workplace.start(*CONFIG, WORKERS, f"store.keep_steps={MAX_AGE + SAVED}", "--run-id", "reuse-killed")
    driver.wait_for(lambda: run.passed(2, "rollout"))
    workplace.kill_worker("RolloutWorker")
    driver.wait_standing(lambda: run.passed(STEPS - 1, "put"))
    driver.kill()
    assert run.summary() is None  # it has not ended before
    workplace.stop_ray()
    for folder in ("ledger", "columns", "policy"):
        for step in (run.path / folder).glob("step-*"):
            if int(step.name.removeprefix("step-")) >= SAVED + (folder == "policy"):
                shutil.rmtree(step)
    workplace.sluice("resume", "reuse-killed")
    assert run.step_metrics() == expected.step_metrics()
    assert run.weights(STEPS) == expected.weights(STEPS)


def test_replayed_it_has_the_same_bits_and_a_fork_takes_groups_of_its_parents_steps(
    workplace: Workplace, expected: Run
) -> None:
    assert "1 steps replayed: same bits" in workplace.sluice("replay", "reuse", "--steps", "3")
    workplace.sluice("fork", "reuse", "--at", "2", "--run-id", "reuse-fork", "--start")
    fork = workplace.run("reuse-fork")
    assert fork.step_metrics() == expected.step_metrics()
    assert fork.weights(STEPS) == expected.weights(STEPS)


def test_another_runs_groups_are_taken_from_the_first_step_on(workplace: Workplace, expected: Run) -> None:
    other = ("data.reuse.run=reuse", "data.reuse.steps=[1,3]", "runtime.max_staleness=1", "steps=2")
    workplace.sluice(*PARTS, *other, "seed=7", "--run-id", "reuse-other")
    run = workplace.run("reuse-other")
    for step, metrics in enumerate(run.step_metrics()):
        groups = list(_reused(run, step))
        assert metrics["reuse/groups"] == len(groups) == NUM_GROUPS
        assert "reuse/age" not in metrics
        assert metrics["rollout/staleness"] == step  # of its own rows
        for source, group, rows in groups:
            assert source in (1, 2)
            assert group < NUM_PROMPTS  # not what that step has reused itself
            stored = [row for row in _rows(expected, source) if row["group_id"] == group]
            assert [row["sample_id"] for row in rows] == [row["sample_id"] for row in stored]
            assert [row["sampler_logprobs"] for row in rows] == [row["sampler_logprobs"] for row in stored]


def test_a_teacher_scores_another_runs_groups_and_its_own_alike(workplace: Workplace, expected: Run) -> None:
    teacher = load_model(ModelConfig(path=str(make_tiny_model(workplace.folder / "reuse-teacher", seed=7))))
    taught = ("data.reuse.run=reuse", "data.reuse.steps=[1,3]", "distillation.teachers.big={path='reuse-teacher'}")
    workplace.sluice(*PARTS, *taught, "steps=2", "--run-id", "reuse-taught")
    run = workplace.run("reuse-taught")
    columns = (*COPIED, "teacher_logprobs")
    for step, metrics in enumerate(run.step_metrics()):
        rows, reused = _rows(run, step, columns), list(_reused(run, step, columns))
        assert metrics["reuse/groups"] == len(reused) == NUM_GROUPS
        for row in rows:
            expected_logprobs = plain_logprobs(teacher, row["prompt_ids"], np.array(row["response_ids"]), 1.0)
            np.testing.assert_allclose(row["teacher_logprobs"], expected_logprobs, rtol=0, atol=1e-5)
        assert metrics["teacher/kl"] > 0
        for source, group, taken in reused:
            stored = [row for row in _rows(expected, source) if row["group_id"] == group]
            assert [row["response_ids"] for row in taken] == [row["response_ids"] for row in stored]
    assert "1 steps replayed: same bits" in workplace.sluice("replay", "reuse-taught", "--steps", "1")


def test_trajectories_are_taken_again_with_all_their_turns(workplace: Workplace) -> None:
    (workplace.folder / "reused_game.py").write_text(GAME)
    environment = 'environment={kind="class", path="reused_game:Asking", max_turn_tokens=12}'
    config = (*PARTS, environment, "rollout.max_response_tokens=48", f"rollout.stop_token_ids={STOPS}", "steps=4")
    config += (f"data.reuse.max_age={MAX_AGE}",)
    workplace.sluice(*config, "--run-id", "reuse-turns")
    expected = workplace.run("reuse-turns")
    found = [(step, each) for step in range(4) for each in _reused(expected, step, TURNS)]
    assert max(len(row["turn_tokens"]) for _, (_, _, rows) in found for row in rows) == 3
    for _, (source, group, rows) in found:
        stored = [row for row in _rows(expected, source, TURNS) if row["group_id"] == group]
        assert [{name: row[name] for name in TURNS} for row in rows] == [
            {name: row[name] for name in TURNS} for row in stored
        ]
    assert "1 steps replayed: same bits" in workplace.sluice("replay", "reuse-turns", "--steps", "3")


def _rows(run: Run, step: int, columns: Sequence[str] = COPIED) -> list[dict]:
    return read_step(run.path, step, [*columns, "group_id"]).to_pylist()


def _reused(run: Run, step: int, columns: Sequence[str] = COPIED) -> Iterator[tuple[int, int, list[dict]]]:
    """Yield a step's reused groups: step and group in which they were sampled, and their rows."""
    rows = [row for row in _rows(run, step, columns) if row["group_id"] >= NUM_PROMPTS]
    for _, group in groupby(rows, key=lambda row: row["group_id"]):
        own = list(group)
        ((source, number),) = {tuple(map(int, row["sample_id"].split("-")[:2])) for row in own}
        yield source, number, own
