"""A run's identity: made once, kept when its directory moves, and not shared by a copy."""

import json
import shutil
from pathlib import Path

import pytest

from infra.storage.identity import claim_identity, identity_of, new_identity, owns_place, run_id_of
from infra.storage.runs import RunDirectory
from schemas.errors import RunError
from tests.support.configs import run_config


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(run_config(tmp_path), "demo")


def test_it_is_made_by_the_first_driver_and_stays(run: RunDirectory) -> None:
    assert identity_of(run) == "demo"
    made = claim_identity(run, run.config())
    assert made == claim_identity(run, run.config()) == identity_of(run)
    assert made != "demo" == run_id_of(made)


def test_a_run_id_is_found_in_an_identity() -> None:
    for run_id in ("a", "demo-20260101-000000-beef", "v1.0", "x.deadbee", "x.deadbeef"):
        assert run_id_of(new_identity(run_id)) == run_id
    assert run_id_of("run-0-1") == "run-0-1"


def test_runs_of_one_id_in_two_folders_are_two(run: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory.create(run_config(tmp_path, runtime={"runs_dir": str(tmp_path / "other")}), "demo")
    assert claim_identity(run, run.config()) != claim_identity(other, other.config())


def test_a_moved_directory_is_the_same_run(run: RunDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = claim_identity(run, run.config())
    moved = RunDirectory(shutil.move(run.path, tmp_path / "elsewhere"))
    assert claim_identity(moved, moved.config()) == made
    again = RunDirectory(shutil.copytree(moved.path, run.path))  # where it was first
    assert claim_identity(again, again.config()) != made
    assert not [record for record in caplog.records if "copy" in record.message][1:]


def test_a_directory_with_two_paths_is_one_run(
    run: RunDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = claim_identity(run, run.config())
    (tmp_path / "link").symlink_to(run.runs_dir)
    linked = RunDirectory(tmp_path / "link" / "demo")
    assert claim_identity(linked, linked.config()) == made
    assert claim_identity(run, run.config()) == made
    assert not caplog.records


def test_a_copy_is_told_and_is_a_run_of_its_own(
    run: RunDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = claim_identity(run, run.config())
    copy = RunDirectory(shutil.copytree(run.path, tmp_path / "other" / "demo"))
    own = claim_identity(copy, copy.config())
    assert own != made
    assert f"{copy.url} is a copy of the run in {run.url}: it is a run of its own" in caplog.text
    assert claim_identity(copy, copy.config()) == own
    assert claim_identity(run, run.config()) == made


@pytest.mark.parametrize("key", ["checkpoint.url", "store.url"])
def test_a_place_that_two_runs_are_given_is_refused_to_the_second(run: RunDirectory, tmp_path: Path, key: str) -> None:
    shared = str(tmp_path / "bucket")
    changes = (
        {"checkpoint": {"url": shared}} if key == "checkpoint.url" else {"store": {"kind": "fsspec", "url": shared}}
    )
    config = run_config(tmp_path, **changes)
    claim_identity(run, config)
    claim_identity(run, config)
    copy = RunDirectory(shutil.copytree(run.path, tmp_path / "other" / "demo"))
    assert not owns_place(copy, shared)
    with pytest.raises(
        RunError, match=rf"bucket/demo is in use by the run .* in {run.url}; set {key} to another place"
    ):
        claim_identity(copy, config)
    claim_identity(copy, run_config(tmp_path))  # the advice
    assert owns_place(run, shared)
    assert not owns_place(copy, shared)
    assert owns_place(copy, str(tmp_path / "new"))


def test_a_damaged_file_is_named(run: RunDirectory) -> None:
    claim_identity(run, run.config())
    (run.path / "identity.json").write_text(json.dumps({"identity": 1}))
    with pytest.raises(RunError, match=r"identity\.json is damaged: .*; remove it"):
        identity_of(run)
