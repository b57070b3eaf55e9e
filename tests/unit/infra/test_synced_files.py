"""What is synced when a file is written: its content, then its name once it has it, and the names of new folders."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.storage.folder import Folder, write_atomic
from infra.storage.journals import JournalFiles
from infra.storage.lines import LocalLines


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is done to files, in order: `sync` and `name`, and of what, relative to the test's folder."""
    noted: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        noted.append(f"sync {'content' if path.is_file() else path.relative_to(tmp_path)}")
        fsync(file)

    def noted_replace(source: str, target: str) -> None:
        noted.append(f"name {Path(target).relative_to(tmp_path)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return noted


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_atomic(folder / "file", "new"),
        lambda folder: LocalLines(folder / "file").replace(["new\n"]),
        lambda folder: Folder(str(folder), {}).write("file", b"new"),
    ],
    ids=["write_atomic", "lines", "folder"],
)
def test_a_replaced_file_and_its_name_are_synced(
    tmp_path: Path, events: list[str], write: Callable[[Path], None]
) -> None:
    (tmp_path / "file").write_text("old")
    write(tmp_path)
    assert events == ["sync content", "name file", "sync ."]


def test_the_names_of_new_folders_are_synced(tmp_path: Path, events: list[str]) -> None:
    folder = Folder(str(tmp_path / "run"), {})
    folder.write("policy/step-1/file", b"new")
    new = ["sync .", "sync run", "sync run/policy"]
    assert events == [*new, "sync content", "name run/policy/step-1/file", "sync run/policy/step-1"]
    events.clear()
    folder.write("policy/step-1/other", b"new")
    assert events == ["sync content", "name run/policy/step-1/other", "sync run/policy/step-1"]


def test_a_journals_new_folder_and_file_are_synced(tmp_path: Path, events: list[str]) -> None:
    folder = Folder(str(tmp_path), {})
    journals = JournalFiles(folder, lambda name, suffix: LocalLines(tmp_path / f"{name}{suffix}"))
    lines = journals.begin(3, 0)
    assert events == ["sync .", "sync journal"]
    lines.append("one\n")
    assert events[2:] == ["sync content", "sync journal/step-000003"]
