"""Errors of the disk, devices and services: one line for the user, the traceback in the run's log."""

import asyncio
import logging
import os
from pathlib import Path

import httpx
import pytest
import torch
from rich.console import Console

from flows.cli import commands
from flows.cli.run import run_training
from infra.storage.driver_log import driver_log, log_error, one_of_several
from infra.storage.runs import RunDirectory
from schemas.errors import RewardFailureError, RunError, describe
from tests.support.command import Command, make_command
from tests.support.configs import run_config


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    return RunDirectory.create(run_config(), "a")


@pytest.fixture
def sluice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return make_command(monkeypatch, capsys)


def test_a_full_disk_and_full_memory_are_described_on_one_line() -> None:
    with pytest.raises(OSError, match="No space left") as full:
        Path("/dev/full").write_text("x")
    assert describe(full.value).startswith("the disk is full ([Errno 28] No space left on device): free some space")
    described = describe(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the docs."))
    assert described.startswith("CUDA out of memory. Tried to allocate 2 GiB. Lower packing.token_budget")
    assert describe(httpx.ConnectError("")) == "ConnectError: no message"


def test_an_error_that_ends_a_run_is_in_its_log_and_the_log_is_named_once(directory: RunDirectory) -> None:
    with pytest.raises(RewardFailureError) as stopped:
        _fail(directory, num_warnings=1)
    log_error(directory, stopped.value)
    assert stopped.value.__notes__ == ["log: runs/a/driver.log"]
    log = (directory.path / "driver.log").read_text()
    assert "WARNING flows: a worker is slow" in log
    assert log.count("Traceback") == 1
    assert log.endswith("schemas.errors.RewardFailureError: all failed\n")


def test_a_log_that_can_not_be_written_changes_nothing(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    os.symlink("/dev/full", directory.path / "driver.log")
    with pytest.raises(RewardFailureError) as stopped:
        _fail(directory, num_warnings=3)
    assert not hasattr(stopped.value, "__notes__")
    assert sum("No space left on device" in line for line in caplog.messages) == 1
    assert "Traceback" not in capsys.readouterr().err


def _fail(directory: RunDirectory, num_warnings: int) -> None:
    with driver_log(directory):
        for _ in range(num_warnings):
            logging.getLogger("flows").warning("a worker is slow")
        raise RewardFailureError("all failed")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (httpx.ConnectError("All connection attempts failed"), "ConnectError: All connection attempts failed"),
        (RewardFailureError("a\nb"), "RewardFailureError: a b"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),  # a bug, whose log is named
    ],
)
def test_an_error_that_ends_a_command_is_one_line_with_its_notes(
    sluice: Command, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    def fail(*_: object) -> None:
        error.add_note("log: runs/a/driver.log")
        error.add_note("resume with: sluice resume a")
        raise error

    monkeypatch.setattr(commands, "_load", fail)
    result = sluice("train", "a.toml")
    assert result.exit_code == 1
    assert result.err == f"stopped: {line}; log: runs/a/driver.log; resume with: sluice resume a\n"


@pytest.mark.parametrize(
    ("error", "is_told"),
    [(RewardFailureError("all failed"), True), (RunError("metrics.jsonl, line 2 is damaged"), False)],
)
def test_only_a_run_that_can_go_on_is_told_to_be_resumed(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, error: Exception, is_told: bool
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("flows.cli.run.run_flow", fail)
    with pytest.raises(type(error)) as stopped:
        run_training(Console(), directory.config(), directory.run_id)
    notes = stopped.value.__notes__
    assert any("driver.log" in note for note in notes)
    assert any("sluice resume" in note for note in notes) == is_told


def test_runs_at_the_same_time_have_logs_of_their_own(tmp_path: Path) -> None:
    directories = [RunDirectory.create(run_config(tmp_path), run_id) for run_id in ("first", "second")]
    shown: dict[str, str | None] = {}

    async def drive(directory: RunDirectory, both: asyncio.Barrier) -> None:
        with driver_log(directory):
            await both.wait()
            logging.getLogger("flows").warning("of %s", directory.run_id)
            shown[directory.run_id] = one_of_several()
            await both.wait()

    async def drive_both() -> None:
        both = asyncio.Barrier(2)
        await asyncio.gather(*(drive(directory, both) for directory in directories))

    asyncio.run(drive_both())
    for directory in directories:
        assert [line.split(": ")[1] for line in (directory.path / "driver.log").read_text().splitlines()] == [
            f"of {directory.run_id}"
        ]
        assert shown[directory.run_id] == directory.run_id
    with driver_log(directories[0]):
        assert one_of_several() is None
