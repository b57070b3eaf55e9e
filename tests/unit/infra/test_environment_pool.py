"""Environment pools: what an environment that crashes, raises or can't be made again costs."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.environment_pools import (
    MODULE,
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
    task,
)
from tests.support.reward_pools import wait_for_exit

BOTH = pytest.mark.parametrize("name", ["Counting", "AsyncCounting"])


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
        ("crash", "died", f"the environment's process ended with signal {signal.SIGSEGV.value} (Segmentation fault)"),
        ("leave", "died", "the environment's process ended with exit code 3"),
        ("killed", "died", f"the environment's process ended with signal {signal.SIGKILL.value} (Killed)"),
        ("raise", "raised", r"RuntimeError: no such luck \(.*faulty_environments.py:\d+ in misbehave\)"),
        ("exit", "raised", "SystemExit: enough"),
    ],
)
@BOTH
def test_a_failed_call_costs_only_its_row_and_leaves_no_trace(name: str, action: str, kind: str, message: str) -> None:
    assert_a_failed_call_costs_only_its_row(name, action, kind, message)


@pytest.mark.parametrize("fault", ["leave", "raise"])
@BOTH
def test_a_failed_reset_costs_only_its_row(name: str, fault: str) -> None:
    assert_a_failed_reset_costs_only_its_row(name, fault)


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


def test_the_cause_of_a_loss_is_found_even_if_it_is_unknown_at_first() -> None:
    with opened("AsyncCounting") as pool:
        open_rows(pool, *"abcd")
        replies = step_rows(pool, ["1", "1", "thread", "1"])
        assert kinds(replies) == {2: "died"}
        assert [contents(replies[row]) for row in (0, 1, 3)] == [counted(row, "1") for row in (0, 1, 3)]


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


@pytest.mark.parametrize(("fault", "kind"), [("raise", "raised"), ("leave", "died")])
def test_a_replay_that_fails_is_its_rows_failure(tmp_path: Path, fault: str, kind: str) -> None:
    assert_a_failed_replay_costs_only_its_row(tmp_path, fault, kind)


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


@pytest.mark.parametrize("fault", ["leave", "raise"])
def test_an_environment_that_cannot_be_closed_costs_nothing(fault: str) -> None:
    assert_a_failed_close_costs_nothing(fault)
