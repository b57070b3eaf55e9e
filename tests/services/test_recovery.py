"""A changed config of a run that is resumed: what was started with the old one is ended, its files are found."""

import logging
from pathlib import Path
from typing import Any

import pytest

from flows.recovery import change_config
from infra.checkpoints import open_checkpoints
from infra.storage.ledger import stage_key
from infra.storage.runs import RunDirectory
from infra.stores.offline import steps_with_columns
from infra.stores.open import open_files
from schemas.config.data import ReuseConfig
from schemas.config.loss import TruncatedCorrection
from schemas.config.store import FsspecStore
from schemas.errors import RunError
from schemas.step import PolicyHandle, RunHandle
from tests.support.checkpoint_tensors import assert_equal, load, save, tensors_of
from tests.support.small_run import make_small_run


@pytest.fixture
def directory(tmp_path: Path, ray_cluster: Any) -> RunDirectory:
    """A run in files, with a ledger entry."""
    directory = make_small_run(tmp_path, kind="fsspec")
    run = RunHandle(
        run_id="demo", identity="demo", directory=str(directory.path), config=directory.config(), store_incarnation="s"
    )
    entry = directory.path / "ledger" / stage_key(run, PolicyHandle(run_id="demo", version=3, incarnation="w"), "put")
    entry.parent.mkdir()
    entry.write_text("{}")
    return directory


def stored_steps(directory: RunDirectory, store: FsspecStore) -> list[int]:
    return steps_with_columns(open_files(directory, store))


def test_a_change_of_limits_touches_no_file(directory: RunDirectory) -> None:
    config, store = directory.config(), FsspecStore(keep_steps=2, capacity_bytes=7)
    changed = change_config(directory, config.replace(store=store))
    assert changed == directory.config() == config.replace(store=store)
    assert stored_steps(directory, store) == [2, 3]
    assert directory.ledger.steps() == [3]


def test_columns_whose_groups_are_trained_on_again_stay_where_they_are(directory: RunDirectory) -> None:
    config, store = directory.config(), FsspecStore(keep_steps="all")
    data = config.data.replace(reuse=ReuseConfig(num_groups=1, max_age=1))
    config = config.replace(data=data, correction=TruncatedCorrection(), store=store)
    directory.write_config(config)
    with pytest.raises(RunError, match=r"leave store.kind and store.url as they were"):
        change_config(directory, config.replace(store=store.replace(url="elsewhere")))
    assert directory.config() == config
    assert stored_steps(directory, store) == [2, 3]


def test_columns_at_another_place_begin_with_the_steps_that_are_not_in_a_checkpoint(
    directory: RunDirectory, tmp_path: Path
) -> None:
    before, store = directory.config(), FsspecStore(url=str(tmp_path / "other"))
    change_config(directory, before.replace(store=store))
    assert isinstance(before.store, FsspecStore)
    assert stored_steps(directory, before.store) == stored_steps(directory, store) == []
    assert directory.ledger.steps() == []


def test_an_old_place_that_is_gone_is_named(directory: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    config = directory.config()
    directory.write_config(config.replace(store=FsspecStore(url="nosuch://columns")))
    with caplog.at_level(logging.WARNING):
        change_config(directory, config)
    assert "can't be removed from their old place: nosuch://columns/demo can't be opened: Protocol not" in caplog.text
    assert directory.config() == config


def test_checkpoints_are_found_at_their_new_place(directory: RunDirectory, tmp_path: Path) -> None:
    config = directory.config()
    save(open_checkpoints(directory, config.checkpoint), 2)
    moved = config.checkpoint.replace(url=str(tmp_path / "elsewhere"))
    for checkpoint in (moved, config.checkpoint):  # there, and back again
        change_config(directory, config.replace(checkpoint=checkpoint))
        assert_equal(load(open_checkpoints(directory, checkpoint), 2), tensors_of(2))


def test_another_run_is_rejected_before_anything_is_changed(directory: RunDirectory) -> None:
    before = directory.config()
    with pytest.raises(RunError, match="can't be resumed with a different seed: that would be another run"):
        change_config(directory, before.replace(seed=1, store=FsspecStore(url="memory://x")))
    assert directory.config() == before
    assert directory.ledger.steps() == [3]
