"""The run directory: finding runs, config changes, metrics, and the driver's lock."""

import json
import multiprocessing
import re
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.storage import run_files
from infra.storage.driver_lock import driver_lock
from infra.storage.lines import LocalLines
from infra.storage.run_files import MetricsFile
from infra.storage.run_list import list_runs, run_status
from infra.storage.runs import RunDirectory, resumed_config
from schemas.batch import StoreUsage
from schemas.config.loss import TruncatedCorrection
from schemas.config.monitor import TensorBoardMonitor
from schemas.config.runtime import WeightsConfig
from schemas.config.store import SharedStore
from schemas.errors import RunError
from schemas.step import EvalReport, RunEvent, RunSummary, StepReport
from tests.support.configs import run_config
from tests.support.tiny import make_tiny_model


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
    assert RunDirectory.open(f"file://{created.path}").path == created.path


def test_a_model_folder_of_the_same_name_is_not_taken_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = RunDirectory.create(run_config(tmp_path), "gemma")
    model = make_tiny_model(tmp_path / "gemma")
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.open("gemma").path == created.path
    with pytest.raises(
        RunError, match=r"gemma/config\.json is not the config of a run .*: steps: Field required; give"
    ) as e:
        RunDirectory.open(str(model)).config()
    assert len(str(e.value)) < 300


def test_a_run_with_a_reward_that_was_removed_is_refused_with_the_version_that_reads_it(tmp_path: Path) -> None:
    created = RunDirectory.create(run_config(tmp_path), "run-1")
    stored = json.loads((created.path / "config.json").read_text())
    stored["reward"] = {"kind": "judge_model", "path": "judge", "prompt": "{response}"}
    (created.path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(
        RunError, match=r'kind = "judge_model" was removed \(the Sluice that wrote them reads runs that have it\)'
    ) as e:
        created.config()
    assert "\n" not in str(e.value)


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


@pytest.mark.parametrize("run_id", ["../elsewhere", "a/b", "", ".hidden"])
def test_a_run_id_is_the_name_of_a_folder(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(RunError, match=r"the run id .* is not a safe name"):
        RunDirectory.create(run_config(tmp_path), run_id)
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_can_not_change_what_it_trains(tmp_path: Path) -> None:
    begun = run_config(tmp_path)
    run = RunDirectory.create(begun, "run-1")
    moved = begun.replace(
        steps=5, runtime=begun.runtime.replace(num_threads=2), weights=WeightsConfig(transport="shared_memory")
    )
    assert resumed_config(run, moved) == moved
    correction, stale = TruncatedCorrection(), begun.runtime.replace(max_staleness=1)
    with pytest.raises(
        RunError, match=r"different correction\.cap, .*runtime\.max_staleness: that would be another run"
    ):
        resumed_config(run, begun.replace(correction=correction, runtime=stale))


def test_a_config_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    directory = RunDirectory.create(config, "run-1")
    for tensorboard, monitors in ((False, ()), (True, (TensorBoardMonitor(),))):
        tree = config.model_dump(mode="json")
        tree["runtime"]["tensorboard"] = tensorboard
        tree["rollout"]["speculative"] = {"num_tokens": 4, "ngram": 3, "max_rows": 16} if tensorboard else None
        tree["store"]["lease_seconds"] = 3600
        (directory.path / "config.json").write_text(json.dumps(tree))
        assert directory.config() == config.replace(monitors=monitors)
        assert resumed_config(directory, config) == config
    tree |= {"store": {"kind": "ray"}}
    tree["runtime"]["weight_transport"] = "object_store"
    (directory.path / "config.json").write_text(json.dumps(tree))
    assert directory.config().store == SharedStore()
    assert directory.config().weights.transport == "shared_memory"


def test_a_step_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    usage = StoreUsage(num_chunks=1, num_rows=2, num_bytes=3, peak_bytes=4, capacity_bytes=5)
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(LocalLines(path))
    metrics.append_step(step(0).replace(store=usage))
    tree = json.loads(path.read_text())
    tree["store"] |= {"leaked_bytes": 0, "open_leases": [0]}
    path.write_text(json.dumps(tree) + "\n")
    assert metrics.steps() == [step(0).replace(store=usage)]


def test_a_line_cut_short_by_a_kill_was_never_committed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(LocalLines(path))
    metrics.append_step(step(0))
    metrics.append_step(step(1))
    whole = path.read_bytes()
    for cut in range(1, 60):
        path.write_bytes(whole[:-cut])
        assert metrics.steps() == [step(0)]


@pytest.mark.parametrize(
    ("line", "readers"),
    [
        (b'{"kind": "step", "step": 1, "pol\n', ("steps", "last_steps", "truncate")),
        (b'{"kind": "step", "step": 1}\n', ("steps", "last_steps")),
        (b"\x00\xff\n", ("steps", "evals", "events", "truncate")),
        (b"[]\n", ("steps", "evals", "events", "truncate")),
    ],
    ids=["cut", "fields", "bytes", "list"],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes, readers: tuple[str, ...]) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(LocalLines(path))
    metrics.append_step(step(0))
    path.write_bytes(path.read_bytes() + line)
    metrics.append_step(step(2))
    damage = rf"^{re.escape(str(path))}, line 2 is damaged: restore that file, or save the weights with `sluice export`"
    for reader in readers:
        with pytest.raises(RunError, match=damage):
            getattr(metrics, reader)(*{"last_steps": [1], "truncate": [0]}.get(reader, []))


@given(
    lines=st.lists(st.text(st.sampled_from("aé"), max_size=9)),
    cut=st.text(max_size=3).filter(str.isalpha),
    block=st.integers(1, 9),
)
def test_lines_backwards(lines: list[str], cut: str, block: int) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch("infra.storage.lines._BLOCK_BYTES", block):
        file = LocalLines(Path(folder) / "lines")
        assert list(file.read_backwards()) == []
        file.append("".join(f"{line}\n" for line in lines) + cut)
        assert list(file.read_backwards()) == [f"{line}\n" for line in reversed(lines)]


@pytest.mark.parametrize("place", ["", "memory://runs-backwards/"])
def test_the_last_steps(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.storage.lines.SEGMENT_BYTES", 700)  # a few reports to an object
    metrics = RunDirectory(place + "run" if place else tmp_path).metrics
    assert metrics.last_steps(0) == []
    for number in range(12):
        metrics.append_step(step(number))
        metrics.append_eval(evaluation(number + 1))
    assert metrics.last_steps(12) == []
    assert metrics.last_steps(9) == [step(9), step(10), step(11)]
    assert metrics.last_steps(0) == metrics.steps()


def test_appending_after_a_cut_line_keeps_both_lines_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(LocalLines(path))
    metrics.append_step(step(0))
    metrics.append_step(step(1))
    path.write_bytes(path.read_bytes()[:-20])
    metrics.truncate(1)
    metrics.append_step(step(1))
    assert metrics.steps() == [step(0), step(1)]


def test_steps_are_counted_unparsed_and_the_newest_is_read_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = MetricsFile(LocalLines(tmp_path / "metrics.jsonl"))
    assert (metrics.num_steps(), metrics.last_step()) == (0, None)
    for number in range(5):
        metrics.append_step(step(number))
    metrics.append_eval(evaluation(5))
    parsed: list[str] = []
    own = run_files._parse_row
    monkeypatch.setattr(run_files, "_parse_row", lambda line: parsed.append(line) or own(line))
    assert metrics.num_steps() == 5
    assert parsed == []
    assert metrics.last_step() == step(4)
    assert len(parsed) == 1


def test_truncating_drops_the_reports_of_steps_that_will_be_run_again(tmp_path: Path) -> None:
    metrics = MetricsFile(LocalLines(tmp_path / "metrics.jsonl"))
    metrics.append_eval(evaluation(0))
    for number in range(3):
        metrics.append_step(step(number))
        metrics.append_eval(evaluation(number + 1))
    restart = RunEvent(kind="restart", step=2, time=1.0, reason="a worker died")
    metrics.append_event(restart)
    metrics.truncate(2)
    assert metrics.steps() == [step(0), step(1)]
    assert [report.policy_version for report in metrics.evals()] == [0, 1, 2]
    assert metrics.events() == [restart]  # it happened, whatever is run again


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
    try:
        held.wait()
        with (
            pytest.raises(RunError, match=r"driven by process \d+ on .*; stop it first: sluice stop"),
            driver_lock(directory),
        ):
            pass
        assert run_status(directory).state == "running"
    finally:
        holder.kill()  # else pytest would wait for it
        holder.join()
    assert run_status(directory).state == "stopped"
    with driver_lock(directory):
        pass


def test_the_list_of_runs_says_how_far_each_has_come(tmp_path: Path) -> None:
    config = run_config(tmp_path, steps=2)
    done, begun, foreign = (RunDirectory.create(config, name) for name in ("done", "begun", "foreign"))
    begun.metrics.append_event(RunEvent(kind="start", step=0, time=7.0))
    for number in range(2):
        done.metrics.append_step(step(number))
    done.metrics.append_eval(evaluation(2))
    figures = {"reward_first": 0.5, "reward_last": 0.5, "accuracy_before": None, "accuracy_after": 0.5, "seconds": 2.0}
    done.write_summary(
        RunSummary(
            **{"run_id": "done", "steps": 2, "tokens_per_second": 1.0, "seconds_by_phase": {}, **figures},
            store_bytes_at_end=0,
            prefect_ui="",
        )
    )
    (foreign.path / "config.json").write_text('{"steps": 2, "of another version": true}')
    runs = {run.run_id: run for run in list_runs(str(tmp_path / "runs"))}
    assert {name: run.state for name, run in runs.items()} == {
        "done": "finished",
        "begun": "stopped",
        "foreign": "unreadable",
    }
    assert (runs["done"].step, runs["done"].steps, runs["done"].reward, runs["done"].accuracy) == (2, 2, 0.5, 0.5)
    assert (runs["begun"].step, runs["begun"].reward, runs["begun"].started_at) == (0, None, 7.0)
    done.write_config(config.replace(steps=3))
    assert run_status(done).state == "stopped"  # it was extended


def test_a_run_that_can_not_be_read_is_listed_and_said_to_be_damaged(tmp_path: Path) -> None:
    cut, summary = (RunDirectory.create(run_config(tmp_path), name) for name in ("cut", "summary"))
    (cut.path / "config.json").write_text('{"steps": ')
    (summary.path / "summary.json").write_text('{"steps": 2')
    assert {run.run_id: run.state for run in list_runs(str(tmp_path / "runs"))} == dict.fromkeys(
        ("cut", "summary"), "unreadable"
    )
    with pytest.raises(RunError, match=r"cut/config.json is damaged: .*; restore it"):
        cut.config()
    with pytest.raises(RunError, match=r"summary.json is damaged: .*; remove it: a resume of the run writes it again"):
        summary.summary()


def test_a_run_of_another_user_is_left_out_of_a_list_and_named_if_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = RunDirectory.create(run_config(tmp_path), "theirs")
    RunDirectory.create(run_config(tmp_path), "mine")
    is_file = Path.is_file

    def refuse(path: Path) -> bool:  # root may read all
        if path.is_relative_to(theirs.path):
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert [run.run_id for run in list_runs(str(tmp_path / "runs"))] == ["mine"]
    with pytest.raises(RunError, match=r"theirs can't be read: .*Permission denied"):
        RunDirectory.open("theirs", str(tmp_path / "runs"))
