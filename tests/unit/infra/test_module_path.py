"""The working directory's place on the module path, and what files next to the config can't shadow."""

import os
import sys
from pathlib import Path

import pytest

from infra.ray.module_path import INSTALLATION, append_working_directory
from tests.support.shadowing_folder import check, folder, run_driver

__all__ = ["folder"]  # a fixture


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["/a", INSTALLATION], ["/a", INSTALLATION, "FOLDER"]),
        (["", "FOLDER", "/a", INSTALLATION, "FOLDER/."], ["/a", INSTALLATION, "FOLDER"]),
        (["FOLDER", "/a"], ["/a", INSTALLATION, "FOLDER"]),  # an editable install, found by a finder of its own
    ],
)
def test_the_working_directory_is_last_once_and_after_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[str], after: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry.replace("FOLDER", os.getcwd()) for entry in before])
    append_working_directory()
    assert sys.path == [entry.replace("FOLDER", os.getcwd()) for entry in after]


@pytest.mark.parametrize(("before", "after"), [(["", "/a"], ["", "/a", INSTALLATION]), ([INSTALLATION, "/a"],) * 2])
def test_a_checkout_as_the_working_directory_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch, before: list[str], after: list[str]
) -> None:
    monkeypatch.chdir(INSTALLATION)
    monkeypatch.setattr(sys, "path", before)
    append_working_directory()
    assert sys.path == after


def test_files_next_to_the_config_shadow_no_module_of_the_driver(folder: Path) -> None:
    check(run_driver(folder)["driver"], folder)
