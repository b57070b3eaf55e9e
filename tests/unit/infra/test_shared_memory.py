"""Folders in shared memory: where they are, and what is left of killed processes."""

import logging
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from infra.storage import shared_memory
from infra.storage.shared_memory import SharedFolder, choose_root, remove_left_over
from schemas.errors import ConfigError
from tests.support.progress import wait_until


def hold_folder(root: Path) -> None:
    folder = SharedFolder(root, "run")
    (folder.path / "1.arrow").write_bytes(bytes(100))
    signal.pause()


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    root = choose_root(str(tmp_path), 0)
    process = multiprocessing.get_context("spawn").Process(target=hold_folder, args=(root,))
    process.start()
    wait_until(lambda: list(root.glob("run-*/1.arrow")))
    (left,) = root.glob("run-*")
    living = SharedFolder(root, "other")
    assert left.exists()
    process.kill()
    process.join()
    SharedFolder(root, "next").remove()
    assert not left.exists()
    assert living.path.exists()
    living.remove()


def test_what_is_left_over_is_removed_where_files_are_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    root = choose_root(None, 0)
    living = SharedFolder(root, "living")
    (root / "run-dead").mkdir(exist_ok=True)
    remove_left_over()
    assert [path for path in root.iterdir() if path.is_dir()] == [living.path]


def test_too_little_shared_memory_is_reported_and_a_disk_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_root(None, 0) == Path(f"/dev/shm/sluice-{os.getuid()}")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert choose_root(None, 2**60) == tmp_path / f"sluice-{os.getuid()}"
    for part in ("/dev/shm", "--shm-size", "runtime.shared_memory", "store.capacity_bytes", str(tmp_path)):
        assert part in caplog.text


def test_a_folder_of_another_user_or_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"sluice-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"is not a folder of this user; set another runtime\.shared_memory"):
        choose_root(str(tmp_path), 0)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"can't be made: .*; set another runtime\.shared_memory"):
        choose_root(str(tmp_path / "file"), 0)
