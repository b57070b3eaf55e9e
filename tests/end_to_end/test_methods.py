"""Runs that combine methods: killed and resumed, or forked, each ends in the weights of an undisturbed one."""

import pytest

from infra.stores.offline import read_step
from tests.support.run_results import Run
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

STEPS, SAVED = 4, 2
PARTS = (
    "reward={kind='weighted', num_processes=0, timeout_seconds=inf, parts={"
    "short={reward={kind='function', path='tiny_rewards:short'}}, "
    "long={reward={kind='length', target=12}, weight=0.3}}}"
)
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", PARTS, "optim.updates_per_step=2", "eval.every_steps=0"),
    *("data.reuse.num_groups=2", "data.reuse.max_age=2"),  # off-policy rows, some of which a correction rejects
    *("store.keep_steps=all", f"checkpoint.every_steps={SAVED}", "checkpoint.keep_last=9"),
)
METHODS = {
    "dppo": (
        *("loss={kind='dppo', clip_low=0.01, clip_high=0.01}", "advantage.kind=gdpo"),
        *("correction={kind='rejected', low=0.9, high=1.1}", "rollout.top_p=0.9", "rollout.sampling_mask=true"),
    ),
    "gmpo": (
        *("loss={kind='gmpo', clip_low=0.02, clip_high=0.03}", "advantage.kind=max_rl", "rollout.top_k=40"),
        *("correction={kind='rejected', level='token', low=0.8, high=1.25, cap=1.1}", "rollout.sampling_mask=true"),
    ),
    "sapo": (
        *("loss.kind=sapo", "advantage.kind=opo", "kl={coef=0.05, estimator='k2'}", "loss.entropy_coef=0.01"),
        *("correction={kind='rejected', level='sequence', low=0.5, high=2.0}",),
    ),
}


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(workplace: Workplace, method: str) -> Run:
    """An undisturbed run."""
    workplace.sluice(*CONFIG, *METHODS[method], "--run-id", f"method-{method}")
    return workplace.run(f"method-{method}")


def test_every_part_of_the_method_acts(expected: Run, method: str) -> None:
    metrics = expected.step_metrics()
    rows = read_step(expected.path, STEPS - 1)
    assert {"reward_short", "reward_long", "behavior_logprobs"} <= set(rows.column_names)
    assert ("sampling_mask_ids" in rows.column_names) == (method != "sapo")
    assert max(each["correction/masked"] for each in metrics) > 0
    assert method == "sapo" or max(each["clip_fraction"] for each in metrics) > 0
    assert all(each["grad_norm"] > 0 for each in metrics)


def test_a_killed_run_ends_in_the_same_weights(workplace: Workplace, expected: Run, method: str) -> None:
    killed = workplace.run(f"{expected.run_id}-killed")
    driver = workplace.start(*CONFIG, *METHODS[method], "--run-id", killed.run_id)
    driver.wait_standing(lambda: killed.passed(1, "put"))
    assert workplace.kill_worker("PolicyWorker") == 1  # the driver starts it again
    driver.resume()
    driver.wait_standing(lambda: killed.passed(STEPS - 1, "advantage"))
    driver.kill()
    assert killed.summary() is None
    workplace.sluice("resume", killed.run_id)
    assert killed.step_metrics() == expected.step_metrics()
    assert killed.weights(STEPS) == expected.weights(STEPS)


def test_a_fork_ends_in_the_same_weights(workplace: Workplace, expected: Run) -> None:
    fork = workplace.run(f"{expected.run_id}-fork")
    printed = workplace.sluice("fork", expected.run_id, "--at", "3", "--run-id", fork.run_id, "--start")
    assert "1 updates repeated" in printed
    assert fork.step_metrics() == expected.step_metrics()
    assert fork.weights(STEPS) == expected.weights(STEPS)
