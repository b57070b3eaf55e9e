"""Unfinished rows of the step before: continued if they are whole, which the driver looks at only after a restart."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import step as steps
from infra.storage.folder import Folder
from infra.stores.open import open_store
from rl_core.views import new_batch
from schemas.batch import ChunkKey
from schemas.rollout import PartialGroups, RolloutHandle, RolloutShard
from schemas.step import PolicyHandle, RunHandle
from tasks import rollout
from tests.support.small_run import DTYPES, make_small_run, rollout_columns

STEP = 3


@pytest.fixture
def run(tmp_path: Path) -> RunHandle:
    directory = make_small_run(tmp_path, kind="fsspec")
    config = directory.config()
    return RunHandle(
        run_id="demo", identity="demo", directory=str(directory.path), config=config, store_incarnation="s"
    )


@pytest.fixture
def before(run: RunHandle) -> RolloutHandle:
    """A rollout of two shards, each of which has begun a row of the step after it."""
    store = open_store(run)
    store.open(STEP + 1)
    groups = rollout.shard_groups(run.config.rollout, range(run.config.rollout.num_prompts), 0)
    shards = [_shard(run, shard, own) for shard, own in groups.items()]
    return RolloutHandle(step=STEP, policy_version=STEP, shards=tuple(shards), generated={})


def _shard(run: RunHandle, shard: int, groups: Sequence[int]) -> RolloutShard:
    columns = rollout_columns(STEP + 1, 0)
    key = ChunkKey(run_id="demo", step=STEP + 1, stage="partial", shard=shard, attempt=1)
    lengths = [len(row) for row in columns["response_ids"].to_pylist()]
    ref = open_store(run).put(key, columns)
    batch = new_batch("demo", STEP + 1, STEP, [ref], DTYPES, [1] * len(lengths), lengths)
    none: tuple[int, ...] = ()
    return RolloutShard(
        shard=shard,
        worker=0,
        groups=tuple(groups),
        rewards=none,
        group_ids=none,
        prompt_lengths=none,
        response_lengths=none,
        loss_tokens=none,
        truncated=none,
        unfinished=(PartialGroups(step=STEP + 1, batch=batch),),
        seconds={},
    )


def test_rows_that_were_stored_just_now_are_not_read_and_others_are_checked(
    run: RunHandle, before: RolloutHandle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[str] = []
    for name in ("read", "map"):
        own = getattr(Folder, name)
        monkeypatch.setattr(Folder, name, lambda folder, path, own=own: read.append(path) or own(folder, path))
    monkeypatch.setattr(rollout, "get_run_logger", lambda: logging.getLogger("run"))
    begun = {shard.shard: shard.unfinished for shard in before.shards}
    assert asyncio.run(rollout._find_begun(run, before, is_new=True)) == begun
    assert read == []
    assert asyncio.run(rollout._find_begun(run, before, is_new=False)) == begun
    assert len(read) == 2 * len(begun)  # a record and the rows
    next(Path(run.directory).glob("columns/step-000004/partial-0-1.*.arrow")).unlink()
    assert asyncio.run(rollout._find_begun(run, before, is_new=False)) == {}
    assert "the unfinished rows of step 3 can't be read: chunk demo/4/partial/0/1" in caplog.text


def test_a_rollout_that_overlaps_its_step_continues_rows_that_were_stored_just_now(
    run: RunHandle, before: RolloutHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[object, ...]] = []

    async def generate(*args: object, **named: object) -> RolloutHandle:
        called.append((*args, named))
        return before

    monkeypatch.setattr(steps, "generate_rollouts", SimpleNamespace(named=lambda name: generate))
    policy = PolicyHandle(run_id="demo", version=STEP + 1, incarnation="w")
    assert asyncio.run(steps._generate_ahead(run, policy, before)) == before
    assert called == [(run, policy, before, {"is_new": True})]
