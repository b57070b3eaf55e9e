"""A run directory on S3: its lock, its metrics and its log; and what a bucket that can't be used is answered with."""

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from s3fs import S3FileSystem

from flows.preflight import check_urls
from flows.recovery import find_or_create_run
from infra.datasets.sft import load_train_rows
from infra.models.load import load_tokenizer
from infra.storage import lease
from infra.storage.driver_lock import driver_lock, find_driver, holds_lock, require_lock
from infra.storage.driver_log import driver_log
from infra.storage.folder import Folder
from infra.storage.lease import Lease, observe_driver
from infra.storage.lines import SEGMENT_BYTES
from infra.storage.run_list import list_runs
from infra.storage.runs import RunDirectory
from infra.workers import inputs
from infra.workers.inputs import keep_rows, open_rows
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, RunError, RunTakenOverError
from schemas.step import RunEvent
from tests.support.configs import run_config
from tests.support.s3 import s3_in_environment
from tests.support.sft import sft_config, write_sums
from tests.support.tiny import make_tiny_model
from tests.unit.infra.test_journal import BATCH, RESET, answer, lengths, read, turn, write
from tests.unit.infra.test_runs import evaluation, step

BUCKET = "runs"


@pytest.fixture(scope="module", autouse=True)
def s3() -> Iterator[None]:
    """An S3 server, found by the environment as on a user's machine."""
    with s3_in_environment(BUCKET):
        yield


@pytest.fixture
def config(tmp_path: Any) -> RunConfig:
    config = run_config(tmp_path)
    return config.replace(runtime=config.runtime.replace(runs_dir=f"s3://{BUCKET}/{tmp_path.name}"))


@pytest.fixture
def run(config: RunConfig) -> RunDirectory:
    return RunDirectory.create(config, "run-1")


def test_a_run_is_found_by_id_and_by_url(config: RunConfig, run: RunDirectory) -> None:
    assert run.argument == f"{config.runtime.runs_dir}/run-1"
    assert RunDirectory.open(run.argument).config() == config
    assert RunDirectory.open("run-1", config.runtime.runs_dir).url == run.url
    with pytest.raises(RunError, match=rf"runs in {config.runtime.runs_dir}/: run-1"):
        RunDirectory.open(f"{config.runtime.runs_dir}/run-2")
    with pytest.raises(RunError, match="run 'run-1' exists"):
        RunDirectory.create(config, "run-1")


def test_a_large_file_is_written_in_parts_and_mapped_from_a_copy(run: RunDirectory) -> None:
    content = pa.py_buffer(os.urandom(2**20) * 65)
    for data in (content, content.slice(3)):  # the second replaces the first
        run.folder.write_large("rows/train.arrow", data)
        assert RunDirectory(run.url).folder.map_copy("rows/train.arrow").equals(data)
    with pytest.raises(FileNotFoundError):
        run.folder.map_copy("rows/held-out.arrow")


def test_rows_of_supervised_fine_tuning_are_encoded_once(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path / "model")
    write_sums(tmp_path)
    config = sft_config(tmp_path, runtime=config.runtime.model_dump())
    run = find_or_create_run(config, "sft-1")
    monkeypatch.setattr(inputs, "_encoded", {})
    keep_rows(run, config)
    rows = open_rows(RunDirectory(run.url), config, "train")
    assert not inputs._encoded  # the rows are those in the bucket
    expected = load_train_rows(config, load_tokenizer(config.model))
    assert [row.response_ids.tolist() for row in rows] == [row.response_ids.tolist() for row in expected]


def test_small_files_are_there_at_once_for_others(run: RunDirectory) -> None:
    key = "step-000002/rollout-d-s"
    run.folder.write(f"ledger/{key}", b"{}")
    run.folder.write("ledger/24ba67f72c59427882751cc45902e46b", b"{}")  # as Prefect names errors
    other = RunDirectory(run.url)
    assert other.ledger.is_committed(key)
    assert not other.ledger.is_outdated()
    other.ledger.drop_failures()
    assert sorted(run.folder.within("ledger").sizes()) == ["format.json", key]
    other.ledger.drop_step(2)
    assert run.ledger.steps() == []


def test_a_journal_is_read_by_the_next_worker_and_dropped(run: RunDirectory) -> None:
    files = RunDirectory(run.url).journals
    write(files, (0, 0, RESET), *((0, number, turn(number, reply=answer("a" * 2**16))) for number in range(1, 9)))
    write(files, (1, 0, RESET))
    files.begin(BATCH.step, BATCH.batch)  # of a worker that wrote nothing
    assert len(run.folder.sizes("journal")) == 2  # an object is written again as it grows
    assert lengths(run.journals) == [9, 1, 0]
    assert read(run.journals)[0][8].reply.observations[0] == "a" * 2**16
    run.journals.drop_before(BATCH.step + 1)
    assert run.journals.steps() == []
    assert run.folder.sizes("journal") == {}


def test_metrics_are_kept_over_drivers_segments_and_truncation(run: RunDirectory) -> None:
    long = RunEvent(kind="restart", step=0, time=1.0, reason="x" * SEGMENT_BYTES)
    with driver_lock(run):
        run.metrics.append_event(long)
        for number in range(3):
            run.metrics.append_step(step(number))
            run.metrics.append_eval(evaluation(number + 1))
        assert len(run.folder.sizes("metrics")) == 2
    with driver_lock(run):
        run.metrics.truncate(2)
        run.metrics.append_step(step(2))
    metrics = RunDirectory(run.url).metrics
    assert metrics.steps() == [step(0), step(1), step(2)]
    assert [report.policy_version for report in metrics.evals()] == [1, 2]
    assert metrics.events() == [long]
    (status,) = list_runs(run.runs_dir)
    assert (status.run_id, status.state, status.step) == ("run-1", "stopped", 3)
    assert status.updated_at is not None


def test_a_second_driver_is_rejected_while_the_first_lives(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.1)
    other = Lease(run.folder, run.run_id, beat_seconds=0.1)
    other.acquire()
    lease._held.clear()  # as in another process
    assert find_driver(run) == other.driver
    with (
        pytest.raises(RunError, match=r"driven by process \d+ on .*; stop it first: sluice stop s3://"),
        driver_lock(run),
    ):
        pass
    other.release()
    assert find_driver(run) is None
    with driver_lock(run):  # at once, as the last one was released
        assert find_driver(run) is not None


def test_a_driver_that_is_not_heard_of_is_replaced_and_stops(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    silent = Lease(run.folder, run.run_id, beat_seconds=1000, lease_seconds=1000)
    silent.acquire()
    metrics = run.metrics
    metrics.append_step(step(0))
    lease._held.clear()  # as in another process
    assert observe_driver(run.folder, seconds=0.2) is None
    next_one = Lease(run.folder, run.run_id, beat_seconds=0.1, lease_seconds=0.5)
    with caplog.at_level(logging.INFO):
        next_one.acquire()
    assert "waiting 0.5 s for a sign of life" in caplog.text
    run.metrics.append_step(step(1))
    lease._held[str(run.folder)] = silent
    assert not holds_lock(run)
    with pytest.raises(RunTakenOverError, match="another driver has taken over run run-1"):
        require_lock(run)
    with pytest.raises(RunTakenOverError, match="this one stops"):
        metrics.append_step(step(9))
    silent.release()
    assert run.metrics.steps() == [step(0), step(1)]
    next_one.release()


def test_of_two_drivers_that_start_at_once_one_wins(run: RunDirectory) -> None:
    leases = [Lease(run.folder, run.run_id) for _ in range(4)]
    won, rejected = list[Lease](), list[Lease]()
    barrier = threading.Barrier(len(leases))

    def acquire(each: Lease) -> None:
        barrier.wait()
        try:
            each.acquire()
            won.append(each)
        except RunError:
            rejected.append(each)

    threads = [threading.Thread(target=acquire, args=(each,)) for each in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(rejected)) == (1, 3)
    won[0].release()


def test_the_log_is_written_at_the_end_and_named_in_the_error(run: RunDirectory) -> None:
    def fail() -> None:
        with driver_log(run):
            logging.getLogger("infra").warning("a line")
            raise ValueError("broken")

    with driver_lock(run), pytest.raises(ValueError, match="broken") as raised:
        fail()
    text = "".join(RunDirectory(run.url).log.read())
    assert "WARNING infra: a line" in text
    assert "Traceback" in text
    assert raised.value.__notes__ == [f"log: {run.url}/driver"]


def test_what_can_not_be_used_is_reported_on_one_line(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def error_at(place: str) -> str:
        with pytest.raises(ConfigError) as raised:
            check_urls(config.replace(runtime=config.runtime.replace(runs_dir=place)))
        assert "\n" not in str(raised.value)
        return str(raised.value)

    check_urls(config)
    assert Folder(config.runtime.runs_dir, {}).sizes() == {}
    assert "bucket does not exist; it needs a bucket that exists" in error_at("s3://absent/runs")
    assert "nosuch://x can't be opened: Protocol not known: nosuch" in error_at("nosuch://x")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    S3FileSystem.clear_instance_cache()  # else the credentials of an earlier one are used
    assert "NoCredentialsError: Unable to locate credentials" in error_at("s3://other/runs")
