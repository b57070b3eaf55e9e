"""Reward pools: what a reward that hangs, crashes or returns nonsense costs."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from infra.processes.slot import MAX_HUNG
from infra.rewards.local import LocalRewardScorer
from infra.rewards.open import check_reward, open_reward_scorer
from rl_core.rewards import RewardOutcome
from schemas.config.reward import ExactReward, FormatReward, FunctionReward, GroupFunctionReward, WeightedReward
from schemas.errors import RewardImportError
from tests.support.reward_pools import LATE, LIMIT_SECONDS, OpenPool, failures, items, rewards, wait_for_exit


@pytest.mark.parametrize("num_processes", [1, 3])
def test_order_is_kept(open_pool: OpenPool, num_processes: int) -> None:
    pool = open_pool(num_processes=num_processes)
    for count in (0, 1, 200):
        assert rewards(pool, *map(str, range(count))) == list(range(count))


def test_a_hung_reward_costs_only_its_row(open_pool: OpenPool, reward_calls: Path) -> None:
    pool = open_pool()
    (pid,) = pool.pids
    completions = ["0", "1", "hang", "3", "4", "spin", *map(str, range(6, 30))]
    outcomes = pool.score(items(*completions))
    assert outcomes == [LATE if row in (2, 5) else RewardOutcome(float(row)) for row in range(30)]
    assert reward_calls.read_text().split("\n")[:-1] == completions  # each once
    assert pool.pids != [pid]
    assert not psutil.pid_exists(pid)
    assert rewards(pool, "1", "2") == [1, 2]


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("crash", f"signal {signal.SIGSEGV.value} (Segmentation fault)"),
        ("leave", "exit code 3"),
        ("killed", f"signal {signal.SIGKILL.value} (Killed)"),
    ],
)
def test_a_reward_whose_process_ends_costs_only_its_row(
    open_pool: OpenPool, completion: str, text: str, num_processes: int
) -> None:
    pool = open_pool(num_processes=num_processes, timeout_seconds=60)
    outcomes = pool.score(items("0", completion, "2", completion, "4", "5"))
    assert [outcome.reward for outcome in outcomes] == [0, None, 2, None, 4, 5]
    assert outcomes[1].failure == f"RewardProcessError: the reward's process ended with {text}"
    assert len(set(pool.pids)) == num_processes


def test_a_return_value_that_is_not_a_reward_is_recorded_as_a_failure(open_pool: OpenPool) -> None:
    found = failures(open_pool(), "raise no such luck", "nan", "text", "1")
    assert found[0] == "RuntimeError: no such luck"
    assert found[1] == "ValueError: the reward is nan; expected a finite number"
    assert "expected a number" in (found[2] or "")
    assert found[3] is None


def test_async_calls_overlap_and_have_limits_of_their_own(open_pool: OpenPool) -> None:
    pool = open_pool("wait", timeout_seconds=10)
    (pid,) = pool.pids
    outcomes = pool.score(items("0", "wait", *(f"overlap {number}" for number in range(2, 100))))
    assert outcomes[1] == RewardOutcome(None, failure="TimeoutError: no answer within 10 s")
    assert outcomes[99] == RewardOutcome(99.0, {"index": 99.0})
    assert sum(outcome.failure is not None for outcome in outcomes) == 1
    assert pool.pids == [pid]


@pytest.mark.parametrize("completion", ["hang", "leave"])
def test_an_async_reward_that_blocks_costs_only_its_row(open_pool: OpenPool, completion: str) -> None:
    pool = open_pool("wait")
    outcomes = pool.score(items("0", "1", completion, "3"))
    assert [outcome.reward for outcome in outcomes] == [0, 1, None, 3]
    text = {"hang": LATE.failure, "leave": "exit code 3"}[completion]
    assert text in (outcomes[2].failure or "")


def test_a_process_that_ended_between_two_steps_is_replaced(open_pool: OpenPool) -> None:
    pool = open_pool()
    assert rewards(pool, "1") == [1]
    os.kill(pool.pids[0], signal.SIGKILL)
    wait_for_exit(pool.pids[0])
    assert rewards(pool, "2", "3") == [2, 3]


def test_without_a_limit_a_lost_process_is_still_replaced(open_pool: OpenPool) -> None:
    pool = open_pool("wait", timeout_seconds=None)
    assert rewards(pool, "1", "leave", "2") == [1, None, 2]


def test_a_reward_that_cannot_be_loaded_says_so(open_pool: OpenPool, tmp_path: Path) -> None:
    with pytest.raises(RewardImportError, match="has no such function 'none'"):
        open_pool("none").wait_until_ready()
    (tmp_path / "leaving_rewards.py").write_text("import os; os._exit(5)\n")
    text = "reward 'leaving_rewards:score': a process ended with exit code 5 while it loaded the reward function; what"
    with pytest.raises(RewardImportError, match=text):
        open_pool(path="leaving_rewards:score").wait_until_ready()


@pytest.mark.parametrize("limits", [{}, {"num_processes": 0, "timeout_seconds": None}])
def test_a_module_that_ends_its_process_is_an_error_before_a_run_begins(
    reward_calls: Path, tmp_path: Path, limits: dict
) -> None:
    (tmp_path / "leaving_rewards.py").write_text("import os; os._exit(5)\n")
    (tmp_path / "fleeing_rewards.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    exact, function = {"kind": "exact"}, {"kind": "function", "path": "fleeing_rewards:score"}
    parts = {"a": {"reward": exact}, "b": {"reward": function}}
    for config, text in [
        (FunctionReward(path="leaving_rewards:score", **limits), "'leaving_rewards:score': .* ended with exit code 5"),
        (GroupFunctionReward(path="leaving_rewards:all", **limits), "'leaving_rewards:all': .* ended with exit code 5"),
        (WeightedReward(parts=parts, **limits), "'fleeing_rewards:score': .* ended with signal 9"),
    ]:
        with pytest.raises(RewardImportError, match=text):
            check_reward(config)
    check_reward(FunctionReward(path="pool_rewards:score", **limits))
    check_reward(WeightedReward(parts={"a": parts["a"]}, **limits))


def test_a_backtracking_regular_expression_costs_only_its_row() -> None:
    scorer = open_reward_scorer(FormatReward(pattern="(a+)+", num_processes=1, timeout_seconds=LIMIT_SECONDS))
    try:
        outcomes = scorer.score(items("aaa", "a" * 60 + "b", "b"))
    finally:
        scorer.close()
    assert [outcome.reward for outcome in outcomes] == [1, None, 0]


def test_quick_rewards_start_no_process() -> None:
    quick = WeightedReward.model_validate({"parts": {"exact": {"reward": {"kind": "exact"}}}})
    for config in (ExactReward(), quick):
        scorer = open_reward_scorer(config)
        assert isinstance(scorer, LocalRewardScorer)
        scorer.wait_until_ready()
        assert rewards(scorer, "!", "?") == [1, 0]
        scorer.close()


def test_any_reward_can_be_computed_in_this_process(open_pool: OpenPool) -> None:
    scorer = open_pool("pid", num_processes=0, timeout_seconds=None)
    assert rewards(scorer, "") == [os.getpid()]


MANNERS = {  # completion: reward, or the end of the failure
    "reads": 0.0,
    "forks": 0.0,
    "forks badly": 1.0,
    "loops alone": 5.0,
    "loops": 5.0,
    "cancels": "CancelledError",
    "interrupts": "KeyboardInterrupt",
    "exits": "SystemExit: 4",
    "7": 7.0,
}


@pytest.mark.parametrize("name", ["score", "wait"])
def test_programs_of_any_manners_cost_at_most_their_row(open_pool: OpenPool, name: str) -> None:
    pool = open_pool(name, timeout_seconds=60)
    pids = pool.pids
    manners = {word: end for word, end in MANNERS.items() if name == "score" or not word.startswith("loops")}
    outcomes = pool.score(items(*manners))
    assert [outcome.failure or outcome.reward for outcome in outcomes] == list(manners.values())
    assert pool.pids == pids


@pytest.mark.parametrize("limits", [{"timeout_seconds": None}, {"timeout_seconds": None, "num_processes": 0}])
def test_a_task_that_cancels_itself_fails_its_row(open_pool: OpenPool, limits: dict) -> None:
    outcomes = open_pool("wait", **limits).score(items("1", "cancel own", "cancels", "2"))
    assert [outcome.reward for outcome in outcomes] == [1, None, None, 2]
    assert outcomes[1].failure == outcomes[2].failure == "CancelledError"


def test_the_time_of_other_calls_is_none_of_an_async_call(open_pool: OpenPool) -> None:
    found = rewards(open_pool("busy", timeout_seconds=1.0), *["1"] * 20)
    assert found == [1.0] * 20  # each computes for 0.1 s, and all together for longer than the limit


def test_threads_that_hang_cost_their_rows_only(open_pool: OpenPool) -> None:
    pool = open_pool("in_thread", timeout_seconds=1.0)
    before = pool.pids
    for _ in range(2):
        assert rewards(pool, *["hang"] * (MAX_HUNG // 2), *["1"] * 20) == [None] * (MAX_HUNG // 2) + [1.0] * 20
    assert rewards(pool, "1") == [1.0]
    assert pool.pids != before  # replaced after the batch in which it told of too many
