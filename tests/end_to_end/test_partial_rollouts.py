"""Responses that are sampled over three steps: their versions, and a run whose processes die in between."""

import shutil
from pathlib import Path

import pytest

from infra.stores.offline import read_step
from tests.support.run_results import Run
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

STEPS, STALENESS, LIMIT = 4, 3, 12
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", "eval.every_steps=0", "store.keep_steps=4"),
    *("rollout.batch_prompts=2", "checkpoint.every_steps=2"),
    *(f"runtime.max_staleness={STALENESS}", "correction.kind=truncated"),
)
WORKERS = "rollout.num_workers=2"  # of the run that is disturbed, which changes no result


@pytest.fixture(scope="module")
def expected(workplace: Workplace) -> Run:
    """An undisturbed run."""
    workplace.sluice(*CONFIG, "--run-id", "in-parts")
    return workplace.run("in-parts")


def test_each_part_is_sampled_by_the_version_of_its_step(expected: Run) -> None:
    for step in range(STEPS):
        columns = read_step(expected.path, step, columns=["response_ids", "sampler_versions", "policy_version"])
        part = LIMIT // STALENESS
        by_token = [max(0, step - STALENESS + at // part) for at in range(LIMIT)]
        rows = columns.to_pydict()
        for ids, versions, newest in zip(*(rows[name] for name in columns.column_names), strict=True):
            assert versions == by_token[: len(ids)]
            assert newest == versions[-1]
    staleness = [step["rollout/staleness"] for step in expected.step_metrics()]
    assert staleness[0] == 0 < staleness[1] <= 1
    assert 1 < staleness[-1] <= STALENESS


def test_only_later_steps_are_off_policy(expected: Run) -> None:
    longest = read_step(expected.path, STEPS - 1, columns=["sampler_logprobs"]).to_pydict()["sampler_logprobs"]
    assert max(map(len, longest)) == LIMIT
    mismatch = [step["mismatch/max"] for step in expected.step_metrics()]
    assert mismatch[0] < 1e-4 < min(mismatch[1:])


def test_whatever_dies_the_weights_are_the_same_and_lost_parts_are_sampled_anew(
    workplace: Workplace, expected: Run, tmp_path: Path
) -> None:
    run = workplace.run("in-parts-disturbed")
    driver = workplace.start(*CONFIG, WORKERS, "--run-id", "in-parts-disturbed")
    driver.wait_for(lambda: run.committed(1, "rollout"))
    workplace.kill_worker("RolloutWorker")  # their finished rows, and what they were about to sample
    driver.wait_standing(lambda: run.committed(2, "put") and not run.committed(3, "rollout"))
    driver.kill()
    workplace.stop_ray()
    killed = shutil.copytree(run.path, tmp_path / "killed")
    printed = workplace.sluice("resume", "in-parts-disturbed")
    assert "are lost" not in printed
    assert run.weights(STEPS) == expected.weights(STEPS)

    shutil.rmtree(run.path)
    shutil.copytree(killed, run.path)
    for part in (run.path / "columns").glob("step-*/partial-*"):
        part.unlink()
    printed = workplace.sluice("resume", "in-parts-disturbed", "rollout.num_workers=1")
    assert "the unfinished rows before step" in printed
    assert run.num_done == STEPS
