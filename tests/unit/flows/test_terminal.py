"""A command that runs a flow goes on when its output or its terminal is gone."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LINES = 2000  # more than a pipe holds
PROGRAM = f"""
import logging, sys
from pathlib import Path
from rich.console import Console
from flows.cli.terminal import outlived_terminal

logging.basicConfig(filename=sys.argv[1], level=logging.WARNING)
console = Console()
with outlived_terminal():
    console.print("started")
    sys.stdin.readline()
    for number in range({LINES}):
        console.print("a line of a step's metrics", "x" * 60)
        print("an error", file=sys.stderr)
    Path(sys.argv[1] + ".done").write_text("all steps")
console.print("the summary")
"""


def start(log: Path, **streams: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(log)], stdin=subprocess.PIPE, **streams)


def go_on(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()
    return process.wait()


def test_a_pipe_that_is_closed(tmp_path: Path) -> None:
    """As by `sluice train | head -1`."""
    process = start(tmp_path / "log", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    process.stdout.close()
    assert go_on(process) == 0
    assert (tmp_path / "log.done").read_text() == "all steps"
    assert (
        "standard output can't be written ([Errno 32] Broken pipe): the run goes on" in (tmp_path / "log").read_text()
    )


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_disk_that_is_full(tmp_path: Path, stream: str) -> None:
    with Path("/dev/full").open("wb") as full:
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | {stream: full.fileno()}
        process = start(tmp_path / "log", **streams)
    assert go_on(process) == 0
    assert (tmp_path / "log.done").read_text() == "all steps"
    assert (tmp_path / "log").read_text().count("No space left on device") == 1


def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    process = start(tmp_path / "log", stdout=terminal, stderr=terminal)
    os.close(terminal)
    assert b"started" in os.read(master, 100)
    process.send_signal(signal.SIGHUP)  # as a shell does whose terminal is closed
    os.close(master)
    assert go_on(process) == 0
    assert (tmp_path / "log.done").read_text() == "all steps"
    text = (tmp_path / "log").read_text()
    assert "the terminal has hung up: the run goes on" in text
    assert "standard output can't be written ([Errno 5]" in text
