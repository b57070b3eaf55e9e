"""What of a run's past steps is kept."""

import shutil
from pathlib import Path

import pytest

from infra.checkpoints.store import CheckpointStore
from infra.history.garbage import collect_garbage
from infra.storage.driver_lock import driver_lock
from infra.storage.identity import claim_identity
from infra.storage.runs import RunDirectory
from infra.stores.step_columns import steps_to_keep
from schemas.config.data import ReuseConfig
from schemas.config.loss import TruncatedCorrection
from schemas.errors import RunError
from tests.support.small_run import columns_of, finish_step, make_small_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Steps 2, 3, 4 and 5 have columns; the newest checkpoint includes those before 5."""
    run = make_small_run(tmp_path, keep_steps="all")
    for step in (4, 5):
        finish_step(columns_of(run), step)
    monkeypatch.setattr(CheckpointStore, "complete_versions", lambda _: [4, 5])
    return run


def test_the_newest_steps_are_kept_within_a_limit() -> None:
    sizes = dict.fromkeys(range(5), 10)
    assert steps_to_keep(sizes, 5, "all", None) == {0, 1, 2, 3, 4}
    assert steps_to_keep(sizes, 5, "all", 25) == {3, 4}
    assert steps_to_keep(sizes, 5, 1, 25) == {4}
    assert steps_to_keep(sizes, 5, 0, 25) == set()
    assert steps_to_keep({0: 10, 1: 1000}, 2, "all", 100) == {1}
    assert steps_to_keep({}, 0, "all", 100) == set()


def test_old_steps_are_removed_and_those_of_a_resume_stay(run: RunDirectory) -> None:
    size = columns_of(run).bytes_by_step()[4]
    planned = collect_garbage(run, 1, None, dry_run=True)
    assert (planned.steps, planned.num_bytes, planned.kept_steps, planned.kept_bytes) == ((2, 3), 2 * size, 1, size)
    assert columns_of(run).steps() == [2, 3, 4, 5]
    for step in (4, 5):  # the latter is not in a checkpoint
        run.journals.begin(step, 0).append("line\n")
    assert collect_garbage(run, 1, None, dry_run=False) == planned
    assert run.journals.steps() == [5]
    assert columns_of(run).steps() == [4, 5]
    assert collect_garbage(run, 0, None, dry_run=False).steps == (4,)
    assert columns_of(run).steps() == [5]


def test_the_runs_own_settings_are_the_default(run: RunDirectory) -> None:
    size = columns_of(run).bytes_by_step()[4]
    assert collect_garbage(run, None, None, dry_run=False).steps == ()
    assert collect_garbage(run, None, 2 * size, dry_run=False).steps == (2,)
    run.write_config(run.config().replace(store=run.config().store.replace(keep_steps=1)))
    assert collect_garbage(run, None, None, dry_run=False).steps == (3,)


def test_steps_whose_groups_may_be_trained_on_again_stay(run: RunDirectory) -> None:
    config = run.config()
    data = config.data.replace(reuse=ReuseConfig(num_groups=1, max_age=1))
    run.write_config(config.replace(data=data, correction=TruncatedCorrection()))
    assert collect_garbage(run, 0, None, dry_run=False).steps == (2,)  # step 3 is for a resume from checkpoint 4
    assert columns_of(run).steps() == [3, 4, 5]


def test_a_run_that_works_or_keeps_nothing_is_left_alone(run: RunDirectory, tmp_path: Path) -> None:
    with driver_lock(run), pytest.raises(RunError, match="run demo is being driven by process"):
        collect_garbage(run, 0, None, dry_run=False)
    shared = make_small_run(tmp_path, "shared", kind="shared", keep_steps=0)
    with pytest.raises(RunError, match="keeps no columns on disk"):
        collect_garbage(shared, 0, None, dry_run=False)
    assert columns_of(run).steps() == [2, 3, 4, 5]


def test_a_copy_leaves_the_columns_of_its_original_alone(run: RunDirectory, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    shutil.copytree(run.columns, bucket / "demo")
    run.write_config(run.config().replace(store=run.config().store.replace(url=str(bucket))))
    claim_identity(run, run.config())
    copy = RunDirectory(shutil.copytree(run.path, tmp_path / "copies" / "demo"))
    with pytest.raises(RunError, match=rf"columns of {copy.url} in {bucket} are those of another run of this id"):
        collect_garbage(copy, 0, None, dry_run=False)
    assert collect_garbage(run, 2, None, dry_run=False).steps == (2,)
    shutil.rmtree(run.path)
    assert collect_garbage(copy, 1, None, dry_run=False).steps == (3,)  # it was moved
