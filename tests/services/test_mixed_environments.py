"""Sources of prompts with environments of their own, in one batch and in an evaluation."""

from pathlib import Path
from typing import Any

import pytest

from schemas.rollout import RolloutShard
from schemas.step import RunHandle
from tests.support.mixed_sources import GREETING, NAMES, folder, mixed
from tests.support.rollout_workers import evaluate, open_store, rows_of, worker_of

__all__ = ["folder"]  # a fixture


@pytest.fixture(autouse=True)
def _importable_rewards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)


def play(run: RunHandle) -> tuple[RolloutShard, dict[str, dict[str, Any]]]:
    store = open_store()
    worker = worker_of(run, store=store)
    try:
        shard = worker.generate(0, 0, 0, range(6))
        return shard, rows_of(store, worker, shard)
    finally:
        worker.close()


def test_each_row_is_answered_by_its_source(folder: Path) -> None:
    shard, rows = play(mixed(folder, **NAMES))
    of_source = {name: [row for row in rows.values() if f'"{name}"' in row["info"]] for name in NAMES}
    assert [len(of_source[name]) for name in NAMES] == [4, 4, 4]
    for row in rows.values():
        assert row["episode_end"] == "done"
        assert row["reward"] == sum(row["turn_rewards"]) == row["reward_turns"] / 2 or row in of_source["plain"]
        assert ("I am" in row["prompt_text"]) == (row in of_source["greeting"])
    for row in of_source["plain"]:
        assert (row["turn_rewards"], row["turn_bridge_tokens"], row["reward"]) == ([0.0], [0], 0.0)
        assert all(row["loss_mask"])
    assert {len(row["turn_tokens"]) for row in of_source["greeting"]} > {1}
    assert {tuple(row["turn_rewards"]) for row in of_source["echo"]} == {(0.5,)}
    assert shard.turns["turns"].weight == len(rows)


def test_slow_environments_of_one_source_change_no_bit(folder: Path) -> None:
    game = {**GREETING, "path": "tests.support.games:Echo"}
    fast, slow = (
        play(mixed(folder, greeting=GREETING, echo={**game, "path": f"tests.support.games:{name}"}, plain=None))[1]
        for name in ("Echo", "Slow")
    )
    assert slow == fast


def test_held_out_rows_have_the_environment_of_their_data_source(folder: Path) -> None:
    report = evaluate(mixed(folder, **NAMES))
    rewards = {source.data_source: source.reward for source in report.sources}
    assert rewards == {"plain": 0.0, "greeting": 1.5}  # of index 2: three turns
