"""A small run, and `sluice inspect` in its folder."""

from functools import partial
from pathlib import Path

import pytest

from infra.storage.runs import RunDirectory
from tests.support.command import Command, make_command
from tests.support.small_run import make_small_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    return make_small_run()


@pytest.fixture
def inspect(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that calls `sluice inspect` in the run's folder."""
    return partial(make_command(monkeypatch, capsys), "inspect")
