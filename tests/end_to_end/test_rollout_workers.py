"""Dynamic sampling, one-step off-policy, two rollout workers: whatever dies, the run ends in the same weights."""

import json

import pytest

from schemas.metric_catalog import metric_spec
from schemas.rollout import RolloutHandle
from tests.support.run_results import Run
from tests.support.workplace import Command, Workplace

pytestmark = pytest.mark.extended

REWARDS = '''
from tiny_rewards import short

def often_equal(prompt, completion, answer, info):
    """Return 1 whatever is said for half of the prompts, and fail for a sixth."""
    if int(answer) % 6 == 0:
        raise RuntimeError("no opinion on this one")
    return short(prompt, completion, answer, info) if int(answer) % 2 else 1.0
'''

DISTURBED = "off-policy-disturbed"
STEPS, NUM_PROMPTS, NUM_SAMPLES = 4, 4, 4
CONFIG = (
    *(
        "train",
        "tiny.toml",
        f"steps={STEPS}",
        "reward.path=equal_rewards:often_equal",
        "kl.coef=0",
        "store.kind=shared",
    ),
    *("rollout.num_workers=2", "rollout.batch_prompts=1", "rollout.dynamic_sampling.max_rounds=6"),
    *("runtime.max_staleness=1", "correction.kind=truncated", "checkpoint.every_steps=2", "eval.every_steps=3"),
    "eval.batch_prompts=1",
    "runtime.weight_transport=broadcast",  # by gloo, here
)


@pytest.fixture(scope="module")
def metrics(workplace: Workplace) -> list[dict[str, float]]:
    """The metrics of an undisturbed run."""
    (workplace.folder / "equal_rewards.py").write_text(REWARDS)
    workplace.sluice(*CONFIG, "--run-id", "off-policy")
    return workplace.run("off-policy").step_metrics()


def test_zero_variance_groups_are_replaced(metrics: list[dict[str, float]]) -> None:
    for step in metrics:
        for name in step:
            metric_spec(name)  # it is in the catalog
        assert step["rollout/rounds"] > 1
        assert step["rollout/groups_generated"] == step["rollout/groups_dropped"] + NUM_PROMPTS
        assert step["groups/zero_variance"] == 0
        assert 0 < step["rollout/zero_variance"] < 1
        assert step["reward/failed"] == 0


def test_steps_are_generated_by_the_previous_version(metrics: list[dict[str, float]]) -> None:
    assert [step["rollout/staleness"] for step in metrics] == [0, 1, 1, 1]
    assert metrics[0]["mismatch/max"] < 1e-4
    assert all(step["mismatch/max"] > 1e-3 for step in metrics[1:])  # the sampler was another policy
    assert all(step["correction/weight"] != 1 for step in metrics[1:])


@pytest.fixture(scope="module")
def driver(workplace: Workplace) -> Command:
    """The driver of a run that is disturbed, and may not run any step again."""
    return workplace.start(*CONFIG, "--run-id", DISTURBED, "runtime.max_restarts=0")


def test_a_lost_rollout_worker(workplace: Workplace, metrics: list[dict[str, float]], driver: Command) -> None:
    run = workplace.run(DISTURBED)
    driver.wait_standing(lambda: run.committed(1, "rollout") and not run.committed(1, "put"))
    rollout = rollout_of(run)
    assert rollout.policy_version == 0
    assert len(set(rollout.group_ids)) == NUM_PROMPTS
    assert rollout.num_rows == NUM_PROMPTS * NUM_SAMPLES
    holders = {shard.worker for shard in rollout.shards if shard.num_rows}
    assert holders <= {0, 1}
    num_lost = 3 - len(holders)  # of two workers, so that at least one held some of these rows; the step goes on
    assert workplace.kill_worker("RolloutWorker", at_most=num_lost) == num_lost
    driver.resume()


def test_then_all_that_is_volatile_is_lost(
    workplace: Workplace, metrics: list[dict[str, float]], driver: Command
) -> None:
    run = workplace.run(DISTURBED)
    driver.wait_standing(lambda: run.num_done >= STEPS - 1)  # no checkpoint has the last two steps yet
    assert "is lost, other workers take over its work" in driver.kill()
    workplace.stop_ray()
    # The columns are gone, and what sampled step 2 is no longer published: the checkpoint has both policies.
    printed = workplace.sluice("resume", run.run_id)
    assert f"step   3/{STEPS}" in printed
    assert f"step   2/{STEPS}" not in printed
    assert run.weights(STEPS) == workplace.run("off-policy").weights(STEPS)
    assert run.step_metrics() == metrics
    assert run.evaluations() == workplace.run("off-policy").evaluations()
    assert [report.policy_version for report in run.evaluations()] == [0, 3, STEPS]
    assert run.store_bytes_at_end() == 0


def rollout_of(run: Run) -> RolloutHandle:
    """Return the ledger's entry of step 1's rollout."""
    entry = json.loads(next(run.step_ledger(1).glob("rollout-*")).read_text())
    result = json.loads(entry["result"]) if isinstance(entry["result"], str) else entry["result"]
    return RolloutHandle.model_validate(result["data"])
