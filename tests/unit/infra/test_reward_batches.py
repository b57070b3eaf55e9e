"""Batches whose items are added one by one, while earlier ones are being scored."""

import ctypes
from pathlib import Path

import pytest

from rl_core.rewards import RewardOutcome
from schemas.errors import RewardImportError
from tests.support.progress import wait_until
from tests.support.reward_pools import LATE, LIMIT_SECONDS, OpenPool, items, rewards


def test_items_are_scored_while_others_are_still_to_be_added(open_pool: OpenPool, reward_calls: Path) -> None:
    for name in ("score", "wait"):
        pool = open_pool(name, num_processes=2, timeout_seconds=60)
        with pool.open_batch() as batch:
            for number, completion in ((7, "70"), (3, "30")):  # in any order
                batch.add(number, *items(completion))
                wait_until_called(reward_calls, completion)
            batch.add(0, *items("5"))
            found = batch.finish()
        assert {number: outcome.reward for number, outcome in found.items()} == {7: 70, 3: 30, 0: 5}
        reward_calls.unlink()


def test_a_stuck_reward_is_killed_while_others_are_still_to_be_added(open_pool: OpenPool) -> None:
    pool = open_pool()
    pids = pool.pids
    with pool.open_batch() as batch:
        batch.add(0, *items("hang"))
        wait_until(lambda: pool.pids not in (pids, []))
        batch.add(1, *items("1"))
        found = batch.finish()
    assert found == {0: LATE, 1: RewardOutcome(1.0)}


@pytest.mark.parametrize("name", ["score", "wait"])
def test_a_failure_costs_only_its_row_if_rows_are_added_one_by_one(
    open_pool: OpenPool, reward_calls: Path, name: str
) -> None:
    completions = ["0", "nan", "text", "raise no such luck", "leave", "5", "hang", "7"]
    pool = open_pool(name, num_processes=2)
    with pool.open_batch() as batch:
        for number, item in enumerate(items(*completions)):
            batch.add(number, item)
            wait_until_called(reward_calls, item.completion)
        found = batch.finish()
    assert [found[number].reward for number in range(8)] == [0, None, None, None, None, 5, None, 7]
    kinds = [(found[number].failure or "").partition(":")[0] for number in (1, 2, 3, 4, 6)]
    assert kinds == ["ValueError", "TypeError", "RuntimeError", "RewardProcessError", "TimeoutError"]


def test_an_answer_in_time_counts_however_late_it_is_read(open_pool: OpenPool) -> None:
    pool = open_pool()
    pids = pool.pids
    pool.wait_until_ready()
    with pool.open_batch() as batch:
        for number, item in enumerate(items("0", "1", "2")):
            batch.add(number, item)
        microseconds = int(1.3e6 * LIMIT_SECONDS)
        ctypes.PyDLL(None).usleep(microseconds)  # holds the interpreter: nothing else runs in this process
        found = batch.finish()
    assert [found[number].reward for number in range(3)] == [0, 1, 2]
    assert pool.pids == pids


@pytest.mark.parametrize(("name", "completion"), [("score", "hang"), ("wait", "wait"), ("score", "8")])
def test_an_abandoned_batch_leaves_nothing_behind(
    open_pool: OpenPool, reward_calls: Path, name: str, completion: str
) -> None:
    pool = open_pool(name, timeout_seconds=60)

    def generate() -> None:
        with pool.open_batch() as batch:
            for number, item in enumerate(items(*[completion] * 40)):
                batch.add(number, item)
            wait_until_called(reward_calls, completion)
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        generate()
    pool.wait_until_ready()
    reward_calls.write_text("")
    assert rewards(pool, "1", "2", "3") == [1, 2, 3]
    assert sorted(reward_calls.read_text().split()) == ["1", "2", "3"]


def test_closing_a_pool_drops_its_batch(open_pool: OpenPool) -> None:
    pool = open_pool(timeout_seconds=60)
    pool.open_batch().add(0, *items("hang"))
    pool.close()
    assert pool.pids == []


def test_a_process_that_cannot_load_the_reward_stops_the_batch(open_pool: OpenPool) -> None:
    with open_pool("none").open_batch() as batch:
        batch.add(0, *items("1"))
        with pytest.raises(RewardImportError, match="has no such function 'none'"):
            batch.finish()


def test_one_batch_at_a_time(open_pool: OpenPool) -> None:
    pool = open_pool()
    with pool.open_batch() as batch:
        with pytest.raises(AssertionError, match="one batch at a time"):
            pool.open_batch()
        assert batch.finish() == {}
        with pytest.raises(AssertionError, match="finished or closed"):
            batch.add(0, *items("1"))


@pytest.mark.parametrize("name", ["score", "wait"])
def test_a_batch_can_be_scored_in_this_process(open_pool: OpenPool, name: str) -> None:
    with open_pool(name, num_processes=0, timeout_seconds=None).open_batch() as batch:
        for number, item in enumerate(items("1", "nan", "raise no such luck")):
            batch.add(2 - number, item)
        with pytest.raises(AssertionError, match="item 2 was added before"):
            batch.add(2, *items("1"))
        found = batch.finish()
    assert [found[number].reward for number in range(3)] == [None, None, 1]
    assert found[0].failure == "RuntimeError: no such luck"


def wait_until_called(calls: Path, completion: str) -> None:
    """Wait until a reward function has been called with this completion."""
    wait_until(lambda: calls.exists() and completion in calls.read_text().splitlines())
