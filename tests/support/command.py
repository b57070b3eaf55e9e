"""Calling the `sluice` command within the test's process."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import prefect.main  # noqa: F401  its first import makes a log handler of stderr, which must not be one test's own
import pytest

from flows.cli import commands, main
from tests.support.ended import note_ended


class Result(NamedTuple):
    """A command's exit code and output."""

    exit_code: int
    out: str
    err: str


Command = Callable[..., Result]


def make_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that calls `sluice` with its arguments, the same however pytest was started."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])  # "" if it was started with `python -m`
    monkeypatch.delitem(sys.modules, "tiny_rewards", raising=False)  # it may be another folder's
    monkeypatch.setattr(commands.console, "width", 1000)
    monkeypatch.setattr(main.errors, "width", 1000)

    def call(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["sluice", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        out, err = capsys.readouterr()
        if not stopped.value.code:
            note_ended(arguments)
        return Result(int(stopped.value.code or 0), out, err)

    return call


def assert_rejected(result: Result, *parts: str) -> None:
    """Assert that a command ended with exit code 2 and one line of error that holds all parts."""
    assert result.exit_code == 2, result.err
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1, result.err
    for part in parts:
        assert part in result.err
