"""A reward model on a Ray worker that dies: the run goes on, with the rewards of the model in one process.

The workers take turns in a GPU's memory, here a CPU's.
"""

import json

import pytest

from infra.rewards.open import open_reward_scorer
from infra.stores.offline import read_step
from infra.workers.reward import open_model_here
from rl_core.rewards import RewardItem, as_stored
from schemas.config.reward import ModelReward
from tests.support.tiny import make_tiny_reward_model
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

STEPS, RUN_ID = 5, "reward-model"
TEXTS = ("prompt_text", "response_text", "answer", "info", "group_id", "sample_id", "reward")


def test_a_lost_reward_worker_scores_again(workplace: Workplace) -> None:
    make_tiny_reward_model(workplace.folder / "reward-model")
    driver = workplace.start(
        *("train", "tiny.toml", "--run-id", RUN_ID, f"steps={STEPS}", "kl.coef=0", "store.keep_steps=all"),
        *("reward.kind=model", "reward.path=reward-model", "reward.max_tokens=200", "runtime.max_restarts=0"),
        "runtime.placement=colocated",
    )
    run = workplace.run(RUN_ID)
    driver.wait_for(lambda: run.passed(0, "put"))
    assert workplace.kill_worker("RewardWorker") == 1
    printed = driver.finish()
    assert "reward-0" in printed  # in the table of workers
    assert "reward worker 0 is lost, and created again" in printed
    turns = run.metrics.steps()[-1].memory_by_phase
    held = {phase: turn.resident_bytes["reward"] for phase, turn in turns.items()}
    assert held["rollout"] > 0
    assert held["scoring"] == held["update"] == 0
    config = ModelReward(path=str(workplace.folder / "reward-model"), max_tokens=200)
    for step in range(STEPS):
        rows = read_step(workplace.folder / "runs" / RUN_ID, step, TEXTS).to_pylist()
        assert [row["reward"] for row in rows] == in_one_process(config, rows)
        assert len({row["reward"] for row in rows}) > 1
    printed = workplace.sluice("replay", RUN_ID, "--steps", "1", "--rewards", "--json")
    again, _ = json.JSONDecoder().raw_decode(printed)  # transformers' progress bar follows
    advantages = again["steps"][0]["advantages"]  # by rounding, they differ from the run's
    assert (advantages["num_rows"], advantages["num_left_out"]) == (16, 0)
    last = run.metrics.evals()[-1]
    figures = f"policy version {STEPS}: accuracy {last.accuracy:.3f}, mean reward {last.reward:.3f} over 4 prompts"
    assert figures in workplace.sluice("eval", RUN_ID)  # by the model in its own process


def in_one_process(config: ModelReward, rows: list[dict]) -> list[float | None]:
    """Return the rows' rewards, with the responses to each prompt in the order in which they were sampled."""
    rows = [row | {"number": int(row["sample_id"].rpartition("-")[2])} for row in rows]
    order = sorted(range(len(rows)), key=lambda index: (rows[index]["group_id"], rows[index]["number"]))
    items = [RewardItem(*(rows[at][name] for name in TEXTS[:3]), json.loads(rows[at]["info"])) for at in order]
    scorer = open_reward_scorer(config, open_model_here)
    scorer.wait_until_ready()
    outcomes = scorer.score(items, [rows[index]["group_id"] for index in order])
    scorer.close()
    by_row = {index: as_stored(outcome.reward) for index, outcome in zip(order, outcomes, strict=True)}
    return [by_row[index] for index in range(len(rows))]
