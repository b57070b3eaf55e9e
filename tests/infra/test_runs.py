"""The run directory: finding runs, config changes, metrics, and the driver's lock."""

import multiprocessing
from pathlib import Path

import pytest

from infra.storage.config_changes import check_changes
from infra.storage.driver_lock import driver_lock
from infra.storage.metrics_file import MetricsFile
from infra.storage.runs import RunDirectory
from schemas.config.correction import TruncatedCorrection
from schemas.errors import RunError
from schemas.step import EvalReport, StepReport
from tests.configs import run_config


def step(number: int) -> StepReport:
    return StepReport(
        step=number, policy_version=number + 1, metrics={"reward": 0.5}, seconds=1.0, seconds_by_phase={"rollout": 1.0}
    )


def evaluation(version: int) -> EvalReport:
    return EvalReport(policy_version=version, num_prompts=2, accuracy=0.5, reward=0.5, num_failed=0, seconds=1.0)


def test_a_run_is_found_by_id_and_by_directory(tmp_path: Path) -> None:
    created = RunDirectory.create(run_config(tmp_path), "run-1")
    assert RunDirectory.open("run-1", str(tmp_path / "runs")).path == created.path
    assert RunDirectory.open(str(created.path)).config() == run_config(tmp_path)


def test_what_a_command_takes_to_find_a_run_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created = RunDirectory.create(run_config(tmp_path), "run-1")
    assert RunDirectory.open(created.argument).path == created.path
    monkeypatch.chdir(tmp_path)
    assert created.argument == "run-1"
    assert RunDirectory.open(created.argument).path == created.path


def test_a_run_is_created_once_and_the_error_for_an_unknown_run_lists_existing_ones(tmp_path: Path) -> None:
    RunDirectory.create(run_config(tmp_path), "run-1")
    with pytest.raises(RunError, match=rf"sluice resume {tmp_path}/runs/run-1$"):
        RunDirectory.create(run_config(tmp_path), "run-1")
    with pytest.raises(RunError, match=r"no run 'run-2'.*run-1"):
        RunDirectory.open("run-2", str(tmp_path / "runs"))


def test_a_resumed_run_can_not_change_what_it_trains(tmp_path: Path) -> None:
    begun = run_config(tmp_path)
    run = RunDirectory.create(begun, "run-1")
    moved = begun.replace(steps=5, runtime=begun.runtime.replace(num_threads=2, weight_transport="object_store"))
    assert check_changes(run, moved) == ["runtime.num_threads", "runtime.weight_transport", "steps"]
    correction, stale = TruncatedCorrection(), begun.runtime.replace(max_staleness=1)
    with pytest.raises(
        RunError, match=r"different correction\.cap, .*runtime\.max_staleness: that would be another run"
    ):
        check_changes(run, begun.replace(correction=correction, runtime=stale))


def test_a_line_cut_short_by_a_kill_was_never_committed(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append_step(step(0))
    metrics.append_step(step(1))
    whole = metrics.path.read_bytes()
    for cut in range(1, 60):
        metrics.path.write_bytes(whole[:-cut])
        assert metrics.steps() == [step(0)]


def test_appending_after_a_cut_line_keeps_both_lines_whole(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append_step(step(0))
    metrics.append_step(step(1))
    metrics.path.write_bytes(metrics.path.read_bytes()[:-20])
    metrics.truncate(1)
    metrics.append_step(step(1))
    assert metrics.steps() == [step(0), step(1)]


def test_truncating_drops_the_reports_of_steps_that_will_be_run_again(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append_eval(evaluation(0))
    for number in range(3):
        metrics.append_step(step(number))
        metrics.append_eval(evaluation(number + 1))
    metrics.truncate(2)
    assert metrics.steps() == [step(0), step(1)]
    assert [report.policy_version for report in metrics.evals()] == [0, 1, 2]


def _hold(path: Path, held: "multiprocessing.synchronize.Event") -> None:  # type: ignore[name-defined]
    with driver_lock(RunDirectory(path)):
        held.set()
        multiprocessing.Event().wait()


def test_one_driver_at_a_time_and_a_killed_one_releases_the_lock(tmp_path: Path) -> None:
    directory = RunDirectory.create(run_config(tmp_path), "run-1")
    spawn = multiprocessing.get_context("spawn")
    held = spawn.Event()
    holder = spawn.Process(target=_hold, args=(directory.path, held))
    holder.start()
    held.wait()
    with pytest.raises(RunError, match="driven by another process"), driver_lock(directory):
        pass
    holder.kill()
    holder.join()
    with driver_lock(directory):
        pass
