"""Steps that are refilled, sampled ahead and by several workers: whoever dies, the run ends in the same weights."""

import json

import pytest

from infra.storage.runs import RunDirectory
from schemas.rollout import RolloutHandle
from tests.services import Workplace

pytestmark = pytest.mark.slow

REWARDS = '''
from tiny_rewards import short

def often_flat(prompt, completion, answer, info):
    """Right whatever is said of half of the prompts, and no opinion on a sixth."""
    if int(answer) % 6 == 0:
        raise RuntimeError("no opinion on this one")
    return short(prompt, completion, answer, info) if int(answer) % 2 else 1.0
'''

STEPS, NUM_PROMPTS, NUM_SAMPLES = 4, 4, 4
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", "reward.path=flat_rewards:often_flat", "kl.coef=0", "store.kind=ray"),
    *("rollout.num_workers=2", "rollout.batch_prompts=1", "rollout.dynamic_sampling.max_rounds=6"),
    *("runtime.max_staleness=1", "correction.kind=truncated", "checkpoint.every_steps=2", "eval.every_steps=3"),
    "runtime.weight_transport=broadcast",  # by gloo, here
)


@pytest.fixture(scope="module")
def metrics(workplace: Workplace) -> list[dict[str, float]]:
    """What a run measured that nothing happened to."""
    (workplace.folder / "flat_rewards.py").write_text(REWARDS)
    workplace.sluice(*CONFIG, "--run-id", "ahead")
    return workplace.metrics("ahead")


def test_flat_groups_are_replaced(metrics: list[dict[str, float]]) -> None:
    for step in metrics:
        assert step["rollout/rounds"] > 1
        assert step["rollout/groups_generated"] == step["rollout/groups_dropped"] + NUM_PROMPTS
        assert step["groups/zero_variance"] == 0
        assert 0 < step["rollout/zero_variance"] < 1
        assert step["reward/failed"] == 0


def test_steps_are_sampled_by_the_version_before(metrics: list[dict[str, float]]) -> None:
    assert [step["rollout/staleness"] for step in metrics] == [0, 1, 1, 1]
    assert metrics[0]["mismatch/max"] < 1e-4
    assert all(step["mismatch/max"] > 1e-3 for step in metrics[1:])  # the sampler was another policy
    assert all(step["correction/weight"] != 1 for step in metrics[1:])


def test_a_lost_rollout_worker_and_then_all_that_is_volatile(
    workplace: Workplace, metrics: list[dict[str, float]]
) -> None:
    run_id = "ahead-disturbed"
    driver = workplace.start(*CONFIG, "--run-id", run_id, "runtime.max_restarts=0")
    workplace.wait_for(workplace.committed(run_id, 1, "rollout"), driver)
    rollout = rollout_of(workplace, run_id)
    assert rollout.policy_version == 0
    assert {shard.worker for shard in rollout.shards} == {0, 1}
    assert len(set(rollout.group_ids)) == NUM_PROMPTS
    assert rollout.num_rows == NUM_PROMPTS * NUM_SAMPLES
    assert workplace.kill_worker("RolloutWorker", at_most=1) == 1  # it held some of these rows; the step goes on
    workplace.wait_for(workplace.committed(run_id, 3, "put"), driver)
    assert "is lost, other workers take over its work" in workplace.kill(driver)
    workplace.stop_ray()
    # The columns are gone, and what sampled step 2 is no longer published: the checkpoint has both policies.
    printed = workplace.sluice("resume", run_id)
    assert f"step   3/{STEPS}" in printed
    assert f"step   2/{STEPS}" not in printed
    assert workplace.weights(run_id, STEPS) == workplace.weights("ahead", STEPS)
    assert workplace.metrics(run_id) == metrics
    assert workplace.store_bytes_at_end(run_id) == 0


def rollout_of(workplace: Workplace, run_id: str) -> RolloutHandle:
    """What the ledger says of step 1's rollout."""
    ledger = RunDirectory(workplace.folder / "runs" / run_id).ledger.path
    entry = json.loads(next(ledger.glob("step-000001/rollout-*")).read_text())
    result = json.loads(entry["result"]) if isinstance(entry["result"], str) else entry["result"]
    return RolloutHandle.model_validate(result["data"])
