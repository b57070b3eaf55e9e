"""The ledger's format: entries that another version of Sluice wrote are never used."""

import logging
from pathlib import Path
from shutil import rmtree

import pytest

from infra.storage.ledger import FORMAT, stage_key, update_key
from infra.storage.runs import RunDirectory
from infra.stores.offline import steps_with_columns
from infra.stores.step_columns import drop_outdated_steps
from schemas.config.changes import sampling_digest, scoring_digest
from schemas.errors import RunError
from schemas.step import PolicyHandle, RunHandle
from tests.support.small_run import columns_of, make_small_run


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run with columns, plans and ledger entries of steps 2 and 3."""
    run = make_small_run(tmp_path, kind="fsspec")
    for step in (2, 3):
        commit(run, step)
        run.folder.write(plan_of(step), b"{}")
    return run


def plan_of(step: int) -> str:
    return f"plans/step-{step:06d}.json"


def commit(run: RunDirectory, step: int) -> str:
    handle = RunHandle(
        run_id="demo", identity="demo", directory=str(run.path), config=run.config(), store_incarnation="s"
    )
    key = stage_key(handle, PolicyHandle(run_id="demo", version=step, incarnation="w"), "put")
    (run.path / "ledger" / key).parent.mkdir(exist_ok=True)
    (run.path / "ledger" / key).write_text("{}")
    return key


def test_keys_name_everything_that_an_entry_depends_on(directory: RunDirectory) -> None:
    config = directory.config()
    run = RunHandle(run_id="demo", identity="demo", directory=str(directory.path), config=config, store_incarnation="s")
    policy = PolicyHandle(run_id="demo", version=7, incarnation="w")
    for stage in ("rollout", "put"):
        assert stage_key(run, policy, stage) == f"step-000007/{stage}-{sampling_digest(config)}-s"
    for stage in ("logprob", "reference", "advantage"):
        assert stage_key(run, policy, stage) == f"step-000007/{stage}-{scoring_digest(config)}-s"
    assert update_key(run, policy, "update") == f"step-000007/update-{scoring_digest(config)}-s-w"
    assert directory.ledger.is_committed(commit(directory, 7))
    assert directory.ledger.steps() == [2, 3, 7]
    directory.ledger.drop_step(7)
    assert directory.ledger.steps() == [2, 3]


def test_a_new_run_has_a_ledger_of_the_current_format(directory: RunDirectory) -> None:
    assert directory.ledger.format() == FORMAT
    assert not directory.ledger.is_outdated()
    assert directory.ledger.steps() == steps_with_columns(columns_of(directory)) == [2, 3]


@pytest.mark.parametrize("older", [None, '{"format": 1}'])
def test_steps_after_the_checkpoint_are_dropped_with_an_older_ledger(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture, older: str | None
) -> None:
    path = directory.path / "ledger" / "format.json"
    path.unlink()
    if older:
        path.write_text(older)
    with caplog.at_level(logging.WARNING):
        drop_outdated_steps(directory, directory.config(), first=3)
    message = f"a ledger of format 1, this Sluice writes format {FORMAT}: the steps after checkpoint 3 are run again"
    assert [message in text for text in caplog.messages] == [True]
    assert directory.ledger.steps() == []
    assert steps_with_columns(columns_of(directory)) == [2]  # included in the checkpoint, and kept for inspection
    assert [directory.folder.size(plan_of(step)) is not None for step in (2, 3)] == [True, False]
    assert directory.ledger.format() == FORMAT
    assert not directory.ledger.is_outdated()


def test_a_lost_ledger_is_called_lost(directory: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    rmtree(directory.path / "ledger")
    with caplog.at_level(logging.WARNING):
        drop_outdated_steps(directory, directory.config(), first=3)
    assert [text for text in caplog.messages if "run again" in text] == [
        "run demo has lost its ledger: the steps after checkpoint 3 are run again"
    ]
    assert directory.ledger.format() == FORMAT


def test_a_killed_driver_drops_the_rest_the_next_time(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory.path / "ledger" / "format.json").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(type(directory.ledger), "renew", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            drop_outdated_steps(directory, directory.config(), first=0)
    assert directory.ledger.is_outdated()
    drop_outdated_steps(directory, directory.config(), first=0)
    assert directory.ledger.steps() == steps_with_columns(columns_of(directory)) == []


def test_a_newer_ledger_is_rejected(directory: RunDirectory) -> None:
    (directory.path / "ledger" / "format.json").write_text(f'{{"format": {FORMAT + 1}}}')
    message = rf"run demo has a ledger of format {FORMAT + 1}, .* up to {FORMAT}: resume the run with the newer Sluice"
    with pytest.raises(RunError, match=message):
        directory.ledger.is_outdated()
    assert directory.ledger.steps() == [2, 3]


@pytest.mark.parametrize("content", ["", "{", '{"format": 0}', '{"format": 2, "more": 1}'])
def test_a_damaged_format_is_rejected(directory: RunDirectory, content: str) -> None:
    (directory.path / "ledger" / "format.json").write_text(content)
    with pytest.raises(RunError, match=r"format\.json is damaged: .*; remove it"):
        directory.ledger.is_outdated()


def test_errors_of_failed_flows_are_dropped(directory: RunDirectory) -> None:
    entry = commit(directory, 2)
    (directory.path / "ledger" / "24ba67f72c59427882751cc45902e46b").write_text("{}")  # as Prefect names it
    directory.ledger.drop_failures()
    assert sorted(path.name for path in (directory.path / "ledger").iterdir()) == [
        "format.json",
        "step-000002",
        "step-000003",
    ]
    assert directory.ledger.is_committed(entry)
