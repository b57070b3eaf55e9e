"""A run that stops with an error is resumed as the error says; what it has done so far is used, whatever changes."""

from pathlib import Path

import pytest

from flows.export import export_run
from flows.plan.footprint import measure_step
from schemas.config.load import override_config
from tests.support.configs import run_config
from tests.support.run_results import Run
from tests.support.stored_run import RUN_ID as STORED
from tests.support.stored_run import unpack_run
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

STEPS = 4
RUN_ID = "changed"
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", "checkpoint.every_steps=3"),
    *("reward.path=tiny_rewards:sometimes", "loss.behavior=recompute"),
)
LIMITS = (
    *("store.put_timeout_seconds=9", "store.keep_steps=3", "reward.timeout_seconds=20"),
    *("reward.num_processes=1", "reward.max_failure_fraction=0.9"),
    *("rollout.max_cache_bytes=10000000", "checkpoint.keep_last=3"),
    *("data.eval_path=", "runtime.shared_memory=memory", "timeouts.worker_seconds=200"),
)
OTHER_WORKERS = (
    *("runtime.num_policy_ranks=2", "packing.token_budget=4096", "model.gradient_checkpointing=true"),
    *("rollout.num_workers=2", "rollout.batch_prompts=2", "runtime.num_threads=1", "checkpoint.url=elsewhere"),
    *("data.eval_path=eval.parquet", "eval.num_prompts=2"),
)


@pytest.fixture(scope="module")
def run(workplace: Workplace) -> Run:
    """A run whose columns don't fit into the store: its responses are longer than simulated ones."""
    too_small = f"store.capacity_bytes={_simulated_bytes(workplace)}"
    printed = workplace.sluice(*CONFIG, "--run-id", RUN_ID, too_small, exit_code=1)
    assert "raise store.capacity_bytes, and resume the run" in printed
    return workplace.run(RUN_ID)


def _simulated_bytes(workplace: Workplace) -> int:
    """Return the smallest capacity with which a run is started."""
    overrides = ["reward.kind=exact", "loss.behavior=recompute"]
    rollout = {"num_prompts": 4, "samples_per_prompt": 4, "max_response_tokens": 12}
    return measure_step(override_config(run_config(workplace.folder, rollout=rollout), overrides, "tiny")).store_bytes


@pytest.fixture(scope="module")
def in_third_step(workplace: Workplace, run: Run) -> Run:
    """The same run in its third step, after that limit was raised, with others; its driver was killed."""
    driver = workplace.start("resume", RUN_ID, "store.capacity_bytes=1000000", *LIMITS)
    driver.wait_standing(lambda: run.num_done == 2 and run.committed(2, "advantage"))
    driver.kill()
    return run


def test_the_errors_advice_is_followed(in_third_step: Run) -> None:
    config = in_third_step.config()
    assert config.store.capacity_bytes == 1_000_000
    assert in_third_step.num_done == 2


def test_the_first_resume_with_other_workers_uses_the_stored_rows(
    workplace: Workplace, in_third_step: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rows = in_third_step, in_third_step.path / "columns" / "step-000002/rollout-0-0.json"
    stored, generated = rows.stat().st_mtime_ns, run.generate_seconds()
    printed = workplace.sluice("resume", RUN_ID, *OTHER_WORKERS)
    assert "step   1/4" in printed  # there is no checkpoint yet: two ranks do what one rank did
    assert "run again" not in printed
    assert run.generate_seconds()[:2] == generated
    assert rows.stat().st_mtime_ns == stored
    assert rows.with_name("behavior-1-0.json").exists()
    assert run.store_bytes_at_end() == 0
    found = [(report.policy_version, report.num_prompts) for report in run.evaluations()]
    assert found == [(0, 4), (0, 2), (STEPS, 2)]  # the first version again, by other settings
    assert run.summary().accuracy_before == run.evaluations()[1].accuracy
    checkpoints = workplace.folder / "elsewhere" / RUN_ID
    assert sorted(path.name for path in checkpoints.iterdir())[-1] == f"step-{STEPS:06d}"
    monkeypatch.chdir(workplace.folder)  # to which the checkpoints' place is relative
    assert export_run(run, Path("changed-weights")) == STEPS


def test_a_run_of_version_0_2_is_resumed(workplace: Workplace) -> None:
    unpack_run(workplace.folder / "runs")
    printed = workplace.sluice("resume", STORED, "steps=3")
    assert "step   3/3" in printed
    assert workplace.run(STORED).num_done == 3
