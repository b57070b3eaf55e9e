"""Environment pools: what an environment costs that goes on beyond its time limit, which these tests wait for."""

from pathlib import Path

import pytest

from tests.support.environment_pools import (
    LIMIT_SECONDS,
    assert_a_failed_call_costs_only_its_row,
    assert_a_failed_close_costs_nothing,
    assert_a_failed_replay_costs_only_its_row,
    assert_a_failed_reset_costs_only_its_row,
    contents,
    counted,
    kinds,
    open_rows,
    opened,
    step_rows,
)
from tests.support.faulty_environments import BIG_CHARACTERS
from tests.support.reward_pools import wait_for_exit

BOTH = pytest.mark.parametrize("name", ["Counting", "AsyncCounting"])
LATE = f"no answer within {LIMIT_SECONDS:g} s"


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [("hang", "timeout", LATE), ("spin", "timeout", LATE)],
)
@BOTH
def test_a_failed_call_costs_only_its_row_and_leaves_no_trace(name: str, action: str, kind: str, message: str) -> None:
    assert_a_failed_call_costs_only_its_row(name, action, kind, message)


@pytest.mark.parametrize("fault", ["hang"])
@BOTH
def test_a_failed_reset_costs_only_its_row(name: str, fault: str) -> None:
    assert_a_failed_reset_costs_only_its_row(name, fault)


@pytest.mark.parametrize(("fault", "kind"), [("hang", "timeout")])
def test_a_replay_that_fails_is_its_rows_failure(tmp_path: Path, fault: str, kind: str) -> None:
    assert_a_failed_replay_costs_only_its_row(tmp_path, fault, kind)


@pytest.mark.parametrize("name", ["MadeOnce", "SlowlyMadeAgain"])
def test_a_replay_that_is_too_slow_once_is_tried_again(tmp_path: Path, name: str) -> None:
    with opened(name, {"folder": str(tmp_path)}) as pool:
        open_rows(pool, *"abc")
        step_rows(pool, {1: "later once hang"})
        assert kinds(step_rows(pool, {2: "leave"})) == {2: "died"}
        replies = step_rows(pool, ["x", "y", "z"])
        assert [replies[row].observations for row in range(3)] == [("x",), ("y",), ("z",)]


@pytest.mark.parametrize("fault", ["hang"])
def test_an_environment_that_cannot_be_closed_costs_nothing(fault: str) -> None:
    assert_a_failed_close_costs_nothing(fault)


def test_an_environments_child_processes_are_killed_with_it(tmp_path: Path) -> None:
    log = tmp_path / "pid"
    with opened("Counting", {"log": str(log)}) as pool:
        open_rows(pool, "")
        assert kinds(step_rows(pool, ["child"])) == {0: "timeout"}
        wait_for_exit(int(log.read_text()))


def test_a_call_that_only_waits_is_cancelled_and_its_process_stays() -> None:
    with opened("AsyncCounting") as pool:
        open_rows(pool, *"abc")
        pids = pool.pids
        replies = step_rows(pool, ["1", "wait", "stubborn"])
        assert kinds(replies) == {1: "timeout", 2: "timeout"}
        replies = step_rows(pool, ["2", "2", "2"])
        assert [contents(replies[row]) for row in range(3)] == [counted(0, "1", "2"), counted(1, "2"), counted(2, "2")]
        assert pool.pids == pids


@pytest.mark.parametrize("action", ["task", "later"])
def test_a_task_of_an_environment_that_blocks_is_its_rows_fault(action: str) -> None:
    with opened("AsyncCounting") as pool:
        open_rows(pool, *"abc")
        step_rows(pool, {0: "1", 2: "1"})
        step_rows(pool, {1: action})
        assert contents(step_rows(pool, {0: "2", 2: "2"})[2]) == counted(2, "1", "2")


def test_a_block_of_which_nobody_knows_whose_it_is_costs_only_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.processes.slot.SILENT_SECONDS", LIMIT_SECONDS)
    with opened("AsyncCounting", step_timeout_seconds=600) as pool:
        open_rows(pool, *"abc")
        replies = step_rows(pool, ["nap", "callback", "1"])
        assert kinds(replies) == {1: "timeout"}
        assert contents(replies[0]) == counted(0, "nap")


def test_a_clock_stands_still_while_code_of_other_rows_runs() -> None:
    with opened("AsyncCounting") as pool:
        open_rows(pool, *"abcd")
        assert kinds(step_rows(pool, ["nap", "block", "block", "block"])) == {}


def test_all_calls_of_a_trajectory_have_a_limit_together() -> None:
    with opened("AsyncCounting", step_timeout_seconds=600, trajectory_timeout_seconds=LIMIT_SECONDS) as pool:
        open_rows(pool, *"ab")
        for _ in range(2):
            replies = step_rows(pool, ["1", "wait"])
            assert kinds(replies) == {1: "timeout"}
            assert replies[1].failure is not None
        assert "all calls of the trajectory together" in replies[1].failure.message


@BOTH
def test_two_hundred_rows_of_which_one_in_ten_is_faulty(name: str) -> None:
    faults = ("hang", "raise", "leave", "big")

    def action(row: int, turn: int) -> str:
        return faults[row // 10 % 4] if row % 10 == 3 and row // 10 % 3 == turn else f"{row} {turn}"

    with opened(name, num_processes=2, max_observation_characters=100) as pool:
        open_rows(pool, *["a"] * 200)
        for turn in range(3):
            replies = step_rows(pool, [action(row, turn) for row in range(200)])
            failures = kinds(replies)
            for row in range(200):
                said = [action(row, past) for past in range(turn + 1)]
                if said[-1] in ("hang", "raise", "leave"):
                    assert failures.pop(row) == {"hang": "timeout", "raise": "raised", "leave": "died"}[said[-1]]
                elif said[-1] == "big":
                    assert replies[row].observations[0].endswith(f"[{BIG_CHARACTERS - 100} more characters were cut]")
                else:
                    successful = [word for word in said if word not in ("hang", "raise", "leave")]
                    assert contents(replies[row]) == counted(row, *successful)
            assert failures == {}
        pids = pool.pids
    for pid in pids:
        wait_for_exit(pid)
