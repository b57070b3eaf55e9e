"""Dynamic sampling, one-step off-policy, two rollout workers: whatever dies, the run ends in the same weights.

The engines compute with adapters as such, and the prompts follow a curriculum over the levels of their file.
"""

import json

import pytest

from schemas.metric_catalog import metric_spec
from schemas.rollout import RolloutHandle
from tests.support.run_results import Run
from tests.support.tiny import make_tiny_model
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
    *("train", "tiny.toml", f"steps={STEPS}", "reward.path=equal_rewards:often_equal", "store.kind=shared"),
    *("rollout.batch_prompts=1", "rollout.dynamic_sampling.max_rounds=6", "eval.batch_prompts=1"),
    *("runtime.max_staleness=1", "correction.kind=truncated", "checkpoint.every_steps=2", "eval.every_steps=3"),
    "weights.transport=broadcast",  # by gloo, here
    *("model.path=adapted", "model.lora.rank=4", "model.lora.publish=adapters", "kl.coef=0.01"),
    *("data.curriculum.kind=levels", "data.curriculum.field=index", "data.curriculum.starts=[0,4,8]"),
    *("data.curriculum.window=2", "data.curriculum.success_threshold=0.95"),
)
WORKERS = "rollout.num_workers=2"  # which changes no result


@pytest.fixture(scope="module")
def expected(workplace: Workplace) -> Run:
    """An undisturbed run."""
    (workplace.folder / "equal_rewards.py").write_text(REWARDS)
    make_tiny_model(workplace.folder / "adapted", head_dim=32)
    printed = workplace.sluice(*CONFIG, "--run-id", "off-policy")
    assert "a prompt is computed once for its samples in a micro-batch" in printed
    return workplace.run("off-policy")


@pytest.fixture(scope="module")
def metrics(expected: Run) -> list[dict[str, float]]:
    """The metrics of the undisturbed run."""
    return expected.step_metrics()


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


def test_the_levels_of_a_file_follow_their_success(expected: Run) -> None:
    shares = [report.sources.schedule.shares for report in expected.metrics.steps() if report.sources]
    assert shares[0] == shares[1] == (333_334, 333_333, 333_333)  # off-policy, step 1 is sampled before 0 is finished
    assert len(set(shares)) == STEPS - 1
    assert {"data/index-4/share", "data/index-4/success_rate"} <= expected.step_metrics()[0].keys()


def test_only_adapters_are_published(workplace: Workplace, expected: Run) -> None:
    assert 0 < max(published_bytes(expected)) < (workplace.folder / "adapted" / "model.safetensors").stat().st_size
    assert expected.weights(STEPS) != expected.weights(STEPS - 2)


@pytest.fixture(scope="module")
def driver(workplace: Workplace) -> Command:
    """The driver of a run that is disturbed, and may run steps again once."""
    return workplace.start(*CONFIG, WORKERS, "--run-id", DISTURBED, "runtime.max_restarts=1")


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
    assert workplace.kill_worker("RolloutWorker", at_most=num_lost) == num_lost  # its successor starts with the base
    driver.resume()


def test_then_a_lost_policy(workplace: Workplace, metrics: list[dict[str, float]], driver: Command) -> None:
    run = workplace.run(DISTURBED)
    driver.wait_standing(lambda: run.passed(2, "rollout"))
    assert "restart" not in [event.kind for event in run.metrics.events()]  # none for the rollout workers
    # Its successor loads the newest checkpoint of adapters, if there is one.
    assert workplace.kill_worker("PolicyWorker") == 1
    driver.resume()
    driver.wait_for(lambda: "restart" in [event.kind for event in run.metrics.events()])


def test_then_all_that_is_volatile_is_lost(
    workplace: Workplace, expected: Run, metrics: list[dict[str, float]], driver: Command
) -> None:
    run = workplace.run(DISTURBED)
    driver.wait_standing(lambda: run.num_done >= STEPS - 1)  # no checkpoint has the last two steps yet
    assert "is lost, other workers take over its work" in driver.kill()
    workplace.stop_ray()
    # The columns are gone, and what sampled step 2 is no longer published: the checkpoint has both policies.
    printed = workplace.sluice("resume", run.run_id)
    assert f"step   3/{STEPS}" in printed
    assert f"step   2/{STEPS}" not in printed
    assert run.weights(STEPS) == expected.weights(STEPS)
    assert run.step_metrics() == metrics
    assert [report.sources for report in run.metrics.steps()] == [report.sources for report in expected.metrics.steps()]
    assert run.evaluations() == expected.evaluations()
    assert [report.policy_version for report in run.evaluations()] == [0, 3, STEPS]
    assert run.store_bytes_at_end() == 0


def rollout_of(run: Run) -> RolloutHandle:
    """Return the ledger's entry of step 1's rollout."""
    entry = json.loads(next(run.step_ledger(1).glob("rollout-*")).read_text())
    result = json.loads(entry["result"]) if isinstance(entry["result"], str) else entry["result"]
    return RolloutHandle.model_validate(result["data"])


def published_bytes(run: Run) -> list[int]:
    """Return how many bytes each version took that was published; off-policy, while steps before were trained."""
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [line["publish"]["num_bytes"] for line in lines if line.get("publish")]
