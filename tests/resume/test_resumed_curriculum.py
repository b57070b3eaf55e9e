"""A run whose curriculum goes back to an older checkpoint takes the same rows again, and ends in the same weights."""

import shutil

import pytest

from tests.services import Workplace

pytestmark = pytest.mark.slow

STEPS, SAVED, KILLED = 6, 2, 4
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", f"checkpoint.every_steps={SAVED}", "checkpoint.keep_last=9"),
    *("runtime.max_staleness=1", "correction.kind=truncated", "rollout.dynamic_sampling.max_rounds=2"),
    *("data.curriculum.kind=levels", "data.curriculum.field=index", "data.curriculum.starts=[0,4,8]"),
    *("data.curriculum.window=2", "data.curriculum.success_threshold=0.95", "eval.every_steps=0"),
)


def test_the_same_rows_after_going_back_to_an_older_checkpoint(workplace: Workplace) -> None:
    workplace.sluice(*CONFIG, "--run-id", "curriculum")
    expected = workplace.run("curriculum")
    sources = [report.sources for report in expected.metrics.steps()]
    shares = [step.schedule.shares for step in sources if step]
    assert shares[0] == shares[1] == (333_334, 333_333, 333_333)  # off-policy, step 1 is sampled before 0 is finished
    assert len(set(shares)) == STEPS - 1
    assert {"data/index-4/share", "data/index-4/success_rate"} <= expected.step_metrics()[0].keys()

    run = workplace.run("curriculum-killed")
    driver = workplace.start(*CONFIG, "--run-id", "curriculum-killed")
    driver.wait_for(lambda: run.passed(1, "rollout"))
    workplace.kill_worker("RolloutWorker")  # rows that are not put yet are sampled again
    driver.wait_for(lambda: run.passed(KILLED, "rollout"))
    driver.kill()
    workplace.stop_ray()
    for folder in ("ledger", "columns"):  # so that rollouts are repeated, too
        for step in (run.path / folder).glob("step-*"):
            shutil.rmtree(step)
    for version in range(SAVED + 1, STEPS):
        shutil.rmtree(run.path / "policy" / f"step-{version:06d}", ignore_errors=True)
    workplace.sluice("resume", "curriculum-killed")
    assert [report.sources for report in run.metrics.steps()] == sources
    assert run.step_metrics() == expected.step_metrics()
    assert run.weights(STEPS) == expected.weights(STEPS)
