"""Environment pools: what an environment that hangs, crashes or returns nonsense costs."""

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.environment_pools import (
    LIMIT_SECONDS,
    MODULE,
    contents,
    counted,
    kinds,
    open_rows,
    opened,
    step_rows,
    task,
)
from tests.support.faulty_environments import BIG_CHARACTERS
from tests.support.reward_pools import wait_for_exit

SLOW = pytest.mark.slow  # waits for a time limit
BOTH = pytest.mark.parametrize("name", ["Counting", "AsyncCounting"])
LATE = f"no answer within {LIMIT_SECONDS:g} s"


@BOTH
def test_rows_are_played_side_by_side(name: str) -> None:
    with opened(name, {"limit": 5}, num_processes=2) as pool:
        opened_rows = open_rows(pool, *"abcdefg")
        assert [opened_rows[row].observations for row in range(7)] == [
            (f"{'abcdefg'[row]} from {row}",) for row in range(7)
        ]
        assert {reply.role for reply in opened_rows.values()} == {"tool" if name == "AsyncCounting" else "user"}
        for turn in range(3):
            replies = step_rows(pool, [str(number) for number in range(turn, 7 + turn)])
            for row in range(7):
                assert contents(replies[row]) == counted(row, *(str(row + number) for number in range(turn + 1)))
                assert replies[row].done == (row + turn + 1 >= 5)
                assert replies[row].seconds > 0
        assert pool.wait() == {}


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        pytest.param("hang", "timeout", LATE, marks=SLOW),
        pytest.param("spin", "timeout", LATE, marks=SLOW),
        ("crash", "died", f"the environment's process ended with signal {signal.SIGSEGV.value} (Segmentation fault)"),
        ("leave", "died", "the environment's process ended with exit code 3"),
        ("killed", "died", f"the environment's process ended with signal {signal.SIGKILL.value} (Killed)"),
        ("raise", "raised", r"RuntimeError: no such luck \(.*faulty_environments.py:\d+ in misbehave\)"),
        ("exit", "raised", "SystemExit: enough"),
    ],
)
@BOTH
def test_a_failed_call_costs_only_its_row_and_leaves_no_trace(name: str, action: str, kind: str, message: str) -> None:
    with opened(name) as pool:
        open_rows(pool, *"abcde")
        step_rows(pool, list("01234"))
        replies = step_rows(pool, ["x", "y", action, "z", "w"])
        assert kinds(replies) == {2: kind}
        failure = replies[2].failure
        assert failure is not None
        assert failure.message.startswith(message) or re.match(message, failure.message)
        for row, said in {0: "x", 1: "y", 3: "z", 4: "w"}.items():
            assert contents(replies[row]) == counted(row, str(row), said)
        replies = step_rows(pool, ["1", "1", "1", action, "1"])
        assert contents(replies[2]) == counted(2, "2", "1")
        assert kinds(replies) == {3: kind}


@pytest.mark.parametrize("fault", [pytest.param("hang", marks=SLOW), "leave", "raise"])
@BOTH
def test_a_failed_reset_costs_only_its_row(name: str, fault: str) -> None:
    with opened(name) as pool:
        replies = open_rows(pool, "a", fault, "c")
        assert list(kinds(replies)) == [1]
        assert replies[2].observations == ("c from 2",)
        assert kinds(step_rows(pool, ["x", "y", "z"])).keys() == {1}
        pool.end(1)
        pool.open(1, task("b"), seed=7)
        assert pool.wait()[1].observations == ("b from 7",)


@SLOW
def test_a_call_that_only_waits_is_cancelled_and_its_process_stays() -> None:
    with opened("AsyncCounting") as pool:
        open_rows(pool, *"abc")
        pids = pool.pids
        replies = step_rows(pool, ["1", "wait", "stubborn"])
        assert kinds(replies) == {1: "timeout", 2: "timeout"}
        replies = step_rows(pool, ["2", "2", "2"])
        assert [contents(replies[row]) for row in range(3)] == [counted(0, "1", "2"), counted(1, "2"), counted(2, "2")]
        assert pool.pids == pids


def test_a_future_of_another_event_loop_is_a_failure() -> None:
    with opened("AsyncCounting") as pool:
        open_rows(pool, *"ab")
        pids = pool.pids
        assert kinds(step_rows(pool, ["foreign", "1"])) == {0: "raised"}
        assert pool.pids == pids


def test_async_calls_overlap() -> None:
    with opened("Meeting") as pool:
        for row in range(50):
            pool.open(row, task(), seed=50)
        pool.wait()
        assert kinds(step_rows(pool, [str(row) for row in range(50)])) == {}


def test_a_plain_environment_may_run_an_event_loop() -> None:
    with opened("Nested") as pool:
        assert open_rows(pool, "")[0].observations == ()
        assert step_rows(pool, ["1"])[0].observations == ("1 True",)


@SLOW
@pytest.mark.parametrize("action", ["task", "later"])
def test_a_task_of_an_environment_that_blocks_is_its_rows_fault(action: str) -> None:
    with opened("AsyncCounting") as pool:
        open_rows(pool, *"abc")
        step_rows(pool, {0: "1", 2: "1"})
        step_rows(pool, {1: action})
        assert contents(step_rows(pool, {0: "2", 2: "2"})[2]) == counted(2, "1", "2")


def test_the_cause_of_a_loss_is_found_even_if_it_is_unknown_at_first() -> None:
    with opened("AsyncCounting") as pool:
        open_rows(pool, *"abcd")
        replies = step_rows(pool, ["1", "1", "thread", "1"])
        assert kinds(replies) == {2: "died"}
        assert [contents(replies[row]) for row in (0, 1, 3)] == [counted(row, "1") for row in (0, 1, 3)]


@SLOW
def test_a_block_of_which_nobody_knows_whose_it_is_costs_only_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.environments.slot.SILENT_SECONDS", LIMIT_SECONDS)
    with opened("AsyncCounting", step_timeout_seconds=600) as pool:
        open_rows(pool, *"abc")
        replies = step_rows(pool, ["nap", "callback", "1"])
        assert kinds(replies) == {1: "timeout"}
        assert contents(replies[0]) == counted(0, "nap")


@SLOW
def test_a_clock_stands_still_while_code_of_other_rows_runs() -> None:
    with opened("AsyncCounting") as pool:
        open_rows(pool, *"abcd")
        assert kinds(step_rows(pool, ["nap", "block", "block", "block"])) == {}


def test_a_process_that_ended_between_two_calls_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with opened("Counting") as pool:
        open_rows(pool, *"ab")
        step_rows(pool, ["1", "1"])
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        wait_for_exit(pid)
        replies = step_rows(pool, ["2", "2"])
        assert [contents(replies[row]) for row in range(2)] == [counted(row, "1", "2") for row in range(2)]
    assert f"environment process {pid} of {MODULE}:Counting is replaced: " in caplog.text


def test_environments_without_a_state_are_only_made_again() -> None:
    with opened("Stateless") as pool:
        open_rows(pool, *"ab")
        step_rows(pool, ["1", "1"])
        assert contents(step_rows(pool, ["2", "leave"])[0])[2]["said"] in (1, 2)  # answered before the loss, or after
        assert contents(step_rows(pool, ["3", "3"])[1]) == counted(1, "3")


def test_another_pools_environment_goes_on_if_it_answers_the_same(tmp_path: Path) -> None:
    with opened("Counting") as pool:
        first = [open_rows(pool, "a")[0], step_rows(pool, ["1"])[0]]
    with opened("Counting") as pool:
        other = [replace(first[0], role="tool"), first[1]], [first[0], replace(first[1], reward=7.0)]
        for row, replies in enumerate([first, *other]):
            pool.open_again(row, task("a"), 0, 0, replies, ["1"])
        replies = step_rows(pool, ["2"] * 3)
        assert contents(replies[0]) == counted(0, "1", "2")
        assert kinds(replies) == {1: "differs", 2: "differs"}
        assert contents(step_rows(pool, {0: "3"})[0]) == counted(0, "1", "2", "3")
    with opened("MadeOnce", {"folder": str(tmp_path)}) as pool:
        first = [open_rows(pool, "a")[0], step_rows(pool, ["later raise"])[0]]
        pool.end(0)
        pool.open_again(0, task("a"), 0, 0, first, ["later raise"])
        assert kinds(step_rows(pool, ["x"])) == {0: "differs"}  # what it had answered now fails
    with opened("Stateless") as pool:
        pool.open_again(0, task("a"), 0, 0, [replace(first[0], role="tool")], [])
        assert contents(step_rows(pool, ["2"])[0]) == counted(0, "2")


@pytest.mark.parametrize(
    ("fault", "kind"), [("raise", "raised"), ("leave", "died"), pytest.param("hang", "timeout", marks=SLOW)]
)
def test_a_replay_that_fails_is_its_rows_failure(tmp_path: Path, fault: str, kind: str) -> None:
    with opened("MadeOnce", {"folder": str(tmp_path)}) as pool:
        open_rows(pool, *"abc")
        step_rows(pool, {1: f"later {fault}"})
        assert kinds(step_rows(pool, {2: "leave"})) == {2: "died"}
        for _ in range(2):
            replies = step_rows(pool, ["x", "y", "z"])
            assert kinds(replies) == {1: kind}
            failure = replies[1].failure
            assert failure is not None
            assert failure.message.startswith("when it was made again: ")


@SLOW
def test_all_calls_of_a_trajectory_have_a_limit_together() -> None:
    with opened("AsyncCounting", step_timeout_seconds=600, trajectory_timeout_seconds=LIMIT_SECONDS) as pool:
        open_rows(pool, *"ab")
        for _ in range(2):
            replies = step_rows(pool, ["1", "wait"])
            assert kinds(replies) == {1: "timeout"}
            assert replies[1].failure is not None
        assert "all calls of the trajectory together" in replies[1].failure.message


def test_an_ended_row_is_closed_and_can_be_opened_anew(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for name in ("Counting", "AsyncCounting"):
        with opened(name, {"log": str(log)}) as pool:
            open_rows(pool, *"ab")
            pool.end(1)
            pool.open(1, task("c"), seed=5)
            pool.step(0, "1")
            pool.end(0)
            replies = pool.wait()
            assert {row: reply.observations for row, reply in replies.items()} == {1: ("c from 5",)}
            assert contents(step_rows(pool, {1: "1"})[1]) == counted(5, "1")
        assert sorted(log.read_text().split()) == ["a", "b"]
        log.unlink()


@pytest.mark.parametrize("fault", [pytest.param("hang", marks=SLOW), "leave", "raise"])
def test_an_environment_that_cannot_be_closed_costs_nothing(fault: str) -> None:
    with opened("Counting") as pool:
        open_rows(pool, *"ab")
        step_rows(pool, [f"close {fault}", "1"])
        pool.end(0)
        assert contents(step_rows(pool, {1: "2"})[1]) == counted(1, "1", "2")


@SLOW
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
