"""A run's checkpoints at another place: copied there whole, and never lost."""

import logging
from pathlib import Path

import pytest

from infra.checkpoints.store import CheckpointStore
from schemas.errors import CheckpointError
from tests.support.checkpoint_tensors import SHARD, assert_equal, load, save, save_assets, tensors_of


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Checkpoints 1 and 2, and an unfinished one."""
    store = CheckpointStore(str(tmp_path / "policy"))
    for version in (1, 2, 3):
        path = save(store, version, write_assets=save_assets)
    Path(path, "manifest.json").unlink()
    return store


@pytest.fixture(params=["file", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "other") if request.param == "file" else f"memory://{tmp_path.name}")


def test_complete_checkpoints_are_copied_and_replace_those_of_an_earlier_time(
    store: CheckpointStore, target: CheckpointStore
) -> None:
    for version in (2, 7):
        save(target, version)
    assert target.copy_from(store) == [1, 2]
    assert target.complete_versions() == store.complete_versions() == [1, 2]
    for version in (1, 2):
        assert target.verify(version) == store.verify(version)
        assert_equal(load(target, version), tensors_of(version))


def test_a_damaged_checkpoint_is_not_copied(
    store: CheckpointStore, target: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    Path(store.path(2), SHARD).write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert target.copy_from(store) == [1]
    assert f"skipped a checkpoint: {store.path(2)}/{SHARD} is missing or damaged" in caplog.text
    assert target.newest() == (1, store.verify(1))


def test_a_place_is_left_as_it_is_if_there_is_nothing_to_copy_or_it_is_the_same(
    store: CheckpointStore, tmp_path: Path
) -> None:
    assert store.copy_from(CheckpointStore(str(tmp_path / "empty"))) == []
    (tmp_path / "link").symlink_to(tmp_path / "policy")
    assert CheckpointStore(str(tmp_path / "link")).copy_from(store) == [1, 2]
    assert store.complete_versions() == [1, 2]
    store.verify(2)


def test_a_place_that_can_not_be_written_is_named(store: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"policy can't be copied to .*file/x: .*; check both places"):
        CheckpointStore(str(tmp_path / "file/x")).copy_from(store)
