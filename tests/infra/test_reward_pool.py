import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infra.rewards import RewardScorer
from infra.rewards.local import LocalRewardScorer
from infra.rewards.open import open_reward_scorer
from infra.rewards.pool import RewardPool
from rl_core.rewards import RewardItem, RewardOutcome
from schemas.config.reward import ExactReward, FormatReward, FunctionReward, WeightedReward
from schemas.errors import RewardImportError

REWARDS = r"""
import asyncio, ctypes, os, signal, subprocess, sys, time

def log(completion):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(completion + "\n")

def misbehave(completion):
    word, _, rest = completion.partition(" ")
    if word == "hang":
        time.sleep(600)
    if word == "spin":
        import re
        re.match(r"(a+)+$", "a" * 60 + "b")  # never lets go of the interpreter
    if word == "crash":
        ctypes.string_at(0)
    if word == "leave":
        os._exit(3)
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "raise":
        raise RuntimeError(rest)
    if word == "nan":
        return float("nan")
    if word == "text":
        return "1.0"
    if word == "start":
        child = subprocess.Popen(["sleep", "600"])
        with open(os.environ["CALLS"] + ".pid", "w") as file:
            file.write(str(child.pid))
        time.sleep(600)
    return float(rest or word)

def score(prompt, completion, answer, info):
    log(completion)
    return misbehave(completion)

num_calls = 0

async def wait(prompt, completion, answer, info):
    global num_calls
    log(completion)
    num_calls += 1
    if completion.startswith("wait"):
        await asyncio.sleep(600)
    while completion.startswith("meet") and num_calls < 100:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    return {"reward": misbehave(completion), "index": info["index"]}

def modules(prompt, completion, answer, info):
    return {"reward": 0, **{name: name in sys.modules for name in ("torch", "transformers", "ray", "numpy", "pyarrow")}}

def pid(prompt, completion, answer, info):
    return os.getpid()
"""


@pytest.fixture(autouse=True)
def calls(tmp_path: Path, monkeypatch) -> Path:
    """The completions that a reward function was called with, one a line."""
    (tmp_path / "pool_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


Open = Callable[..., RewardPool]


@pytest.fixture
def open_pool() -> Iterator[Open]:
    pools = []

    def open_one(name: str = "score", **changes: object) -> RewardPool:
        fields = {"path": f"pool_rewards:{name}", "num_processes": 1, "timeout_seconds": 1.0}
        pools.append(open_reward_scorer(FunctionReward.model_validate(fields | changes)))
        return pools[-1]

    yield open_one
    for pool in pools:
        pool.close()


def items(*completions: str) -> list[RewardItem]:
    return [RewardItem("?", completion, "!", {"index": index}) for index, completion in enumerate(completions)]


def rewards(scorer: RewardScorer, *completions: str) -> list[float | None]:
    return [outcome.reward for outcome in scorer.score(items(*completions))]


def failures(scorer: RewardScorer, *completions: str) -> list[str | None]:
    return [outcome.failure for outcome in scorer.score(items(*completions))]


@pytest.mark.parametrize("num_processes", [1, 3])
def test_order_is_kept(open_pool: Open, num_processes: int) -> None:
    pool = open_pool(num_processes=num_processes)
    for count in (0, 1, 200):
        assert rewards(pool, *map(str, range(count))) == list(range(count))


def test_a_hung_reward_costs_its_row_only(open_pool: Open, calls: Path) -> None:
    pool = open_pool()
    (pid,) = pool.pids
    completions = ["0", "1", "hang", "3", "4", "spin", *map(str, range(6, 30))]
    outcomes = pool.score(items(*completions))
    late = RewardOutcome(None, failure="TimeoutError: no answer within 1 s")
    assert outcomes == [late if row in (2, 5) else RewardOutcome(float(row)) for row in range(30)]
    assert calls.read_text().split("\n")[:-1] == completions  # each once
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
def test_a_reward_whose_process_ends_costs_its_row_only(
    open_pool: Open, completion: str, text: str, num_processes: int
) -> None:
    pool = open_pool(num_processes=num_processes, timeout_seconds=60)
    outcomes = pool.score(items("0", completion, "2", completion, "4", "5"))
    assert [outcome.reward for outcome in outcomes] == [0, None, 2, None, 4, 5]
    assert outcomes[1].failure == f"RewardProcessError: the reward's process ended with {text}"
    assert len(set(pool.pids)) == num_processes


def test_what_is_no_reward_is_recorded(open_pool: Open) -> None:
    found = failures(open_pool(), "raise no such luck", "nan", "text", "1")
    assert found[0] == "RuntimeError: no such luck"
    assert found[1] == "ValueError: the reward is nan; expected a finite number"
    assert "expected a number" in (found[2] or "")
    assert found[3] is None


def test_async_calls_overlap_and_have_limits_of_their_own(open_pool: Open) -> None:
    pool = open_pool("wait", timeout_seconds=2)
    (pid,) = pool.pids
    outcomes = pool.score(items("0", "wait", *(f"meet {number}" for number in range(2, 100))))
    assert outcomes[1] == RewardOutcome(None, failure="TimeoutError: no answer within 2 s")
    assert outcomes[99] == RewardOutcome(99.0, {"index": 99.0})
    assert sum(outcome.failure is not None for outcome in outcomes) == 1
    assert pool.pids == [pid]


@pytest.mark.parametrize("completion", ["hang", "leave"])
def test_an_async_reward_that_blocks_costs_its_row_only(open_pool: Open, completion: str) -> None:
    pool = open_pool("wait")
    outcomes = pool.score(items("0", "1", completion, "3"))
    assert [outcome.reward for outcome in outcomes] == [0, 1, None, 3]
    text = {"hang": "TimeoutError: no answer within 1 s", "leave": "exit code 3"}[completion]
    assert text in (outcomes[2].failure or "")


def test_a_process_that_ended_between_two_steps_is_replaced(open_pool: Open) -> None:
    pool = open_pool()
    assert rewards(pool, "1") == [1]
    os.kill(pool.pids[0], signal.SIGKILL)
    wait_for_end(pool.pids[0])
    assert rewards(pool, "2", "3") == [2, 3]


def test_without_a_limit_a_reward_may_take_its_time(open_pool: Open) -> None:
    pool = open_pool("wait", timeout_seconds=None)
    assert rewards(pool, "1", "leave", "2") == [1, None, 2]


def test_a_process_imports_no_more_than_the_reward_does(open_pool: Open) -> None:
    (outcome,) = open_pool("modules").score(items(""))
    assert outcome.parts == dict.fromkeys(("torch", "transformers", "ray", "numpy", "pyarrow"), 0.0)


def test_what_a_reward_started_ends_with_it(open_pool: Open, calls: Path) -> None:
    pool = open_pool()
    assert failures(pool, "start") == ["TimeoutError: no answer within 1 s"]
    wait_for_end(int(Path(f"{calls}.pid").read_text()))


def test_close_ends_all_processes(open_pool: Open) -> None:
    pool = open_pool(num_processes=2)
    pids = pool.pids
    assert all(psutil.pid_exists(pid) for pid in pids)
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    pool.close()


def test_a_forgotten_pool_ends_its_processes() -> None:
    pool = open_reward_scorer(FunctionReward(path="pool_rewards:score", num_processes=1))
    assert isinstance(pool, RewardPool)
    assert rewards(pool, "1") == [1]
    pids = pool.pids
    del pool
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("how", ["killed", "ended"])
@pytest.mark.parametrize("completion", ["spin", "start", "1"])
def test_the_processes_end_with_their_parent(calls: Path, how: str, completion: str) -> None:
    program = f"""
import os, sys, threading
from infra.rewards.open import open_reward_scorer
from rl_core.rewards import RewardItem
from schemas.config.reward import FunctionReward

pool = open_reward_scorer(FunctionReward(path="pool_rewards:score", num_processes=1, timeout_seconds=600))
pool.wait_until_ready()
if {completion!r} == "1":
    pool.score([RewardItem("", "1", "", {{}})])
else:
    threading.Thread(target=pool.score, args=([RewardItem("", {completion!r}, "", {{}})],), daemon=True).start()
print(*pool.pids, flush=True)
sys.stdin.readline()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, os.getcwd()]))}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline())]
        wait_until(lambda: calls.exists() and calls.read_text() == f"{completion}\n")
        if completion == "start":
            wait_until(lambda: Path(f"{calls}.pid").exists() and Path(f"{calls}.pid").read_text() != "")
            pids.append(int(Path(f"{calls}.pid").read_text()))
        if how == "killed":
            parent.kill()
        else:
            parent.stdin.close()
        for pid in pids:
            wait_for_end(pid)


def test_a_reward_that_cannot_be_loaded_says_so(open_pool: Open, tmp_path: Path) -> None:
    with pytest.raises(RewardImportError, match="has no such function 'none'"):
        open_pool("none").wait_until_ready()
    (tmp_path / "leaving_rewards.py").write_text("import os; os._exit(5)\n")
    with pytest.raises(RewardImportError, match="ended with exit code 5 while it loaded"):
        open_pool(path="leaving_rewards:score").wait_until_ready()


def test_a_regular_expression_may_not_stop_the_run() -> None:
    scorer = open_reward_scorer(FormatReward(pattern="(a+)+", num_processes=1, timeout_seconds=0.5))
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


def test_any_reward_can_be_scored_here(open_pool: Open) -> None:
    scorer = open_pool("pid", num_processes=0, timeout_seconds=None)
    assert rewards(scorer, "") == [os.getpid()]


def test_items_are_scored_while_others_are_still_to_come(open_pool: Open, calls: Path) -> None:
    for name in ("score", "wait"):
        pool = open_pool(name, num_processes=2, timeout_seconds=60)
        with pool.open_batch() as batch:
            for number, completion in ((7, "70"), (3, "30")):  # in any order
                batch.add(number, *items(completion))
                wait_until(lambda line=f"{completion}\n": calls.exists() and line in calls.read_text())
            batch.add(0, *items("5"))
            found = batch.finish()
        assert {number: outcome.reward for number, outcome in found.items()} == {7: 70, 3: 30, 0: 5}
        calls.unlink()


def test_a_stuck_reward_is_ended_while_others_are_still_to_come(open_pool: Open) -> None:
    pool = open_pool()
    pids = pool.pids
    with pool.open_batch() as batch:
        batch.add(0, *items("hang"))
        wait_until(lambda: pool.pids not in (pids, []))
        batch.add(1, *items("1"))
        found = batch.finish()
    late = RewardOutcome(None, failure="TimeoutError: no answer within 1 s")
    assert found == {0: late, 1: RewardOutcome(1.0)}


@pytest.mark.parametrize("name", ["score", "wait"])
def test_what_goes_wrong_costs_its_row_only_where_rows_come_one_by_one(open_pool: Open, name: str) -> None:
    completions = ["0", "nan", "text", "raise no such luck", "leave", "5", "hang", "7"]
    pool = open_pool(name, num_processes=2)
    with pool.open_batch() as batch:
        for number, item in enumerate(items(*completions)):
            batch.add(number, item)
            time.sleep(0.01)
        found = batch.finish()
    assert [found[number].reward for number in range(8)] == [0, None, None, None, None, 5, None, 7]
    kinds = [(found[number].failure or "").partition(":")[0] for number in (1, 2, 3, 4, 6)]
    assert kinds == ["ValueError", "TypeError", "RuntimeError", "RewardProcessError", "TimeoutError"]


def test_an_answer_in_time_counts_however_late_it_is_read(open_pool: Open) -> None:
    pool = open_pool()
    pids = pool.pids
    pool.wait_until_ready()
    with pool.open_batch() as batch:
        for number, item in enumerate(items("0", "1", "2")):
            batch.add(number, item)
        ctypes.PyDLL(None).usleep(1_500_000)  # holds the interpreter: nothing else runs in this process
        found = batch.finish()
    assert [found[number].reward for number in range(3)] == [0, 1, 2]
    assert pool.pids == pids


@pytest.mark.parametrize(("name", "completion"), [("score", "hang"), ("wait", "wait"), ("score", "8")])
def test_an_abandoned_batch_leaves_nothing_behind(open_pool: Open, calls: Path, name: str, completion: str) -> None:
    pool = open_pool(name, timeout_seconds=60)

    def generate() -> None:
        with pool.open_batch() as batch:
            for number, item in enumerate(items(*[completion] * 40)):
                batch.add(number, item)
            wait_until(lambda: calls.exists() and calls.read_text() != "")
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        generate()
    pool.wait_until_ready()
    calls.write_text("")
    assert rewards(pool, "1", "2", "3") == [1, 2, 3]
    assert sorted(calls.read_text().split()) == ["1", "2", "3"]


def test_closing_a_pool_drops_its_batch(open_pool: Open) -> None:
    pool = open_pool(timeout_seconds=60)
    pool.open_batch().add(0, *items("hang"))
    pool.close()
    assert pool.pids == []


def test_a_process_that_cannot_load_the_reward_stops_the_batch(open_pool: Open) -> None:
    with open_pool("none").open_batch() as batch:
        batch.add(0, *items("1"))
        with pytest.raises(RewardImportError, match="has no such function 'none'"):
            batch.finish()


def test_one_batch_at_a_time(open_pool: Open) -> None:
    pool = open_pool()
    with pool.open_batch() as batch:
        with pytest.raises(AssertionError, match="one batch at a time"):
            pool.open_batch()
        assert batch.finish() == {}
        with pytest.raises(AssertionError, match="finished or closed"):
            batch.add(0, *items("1"))


@pytest.mark.parametrize("name", ["score", "wait"])
def test_a_batch_is_scored_here_too(open_pool: Open, name: str) -> None:
    with open_pool(name, num_processes=0, timeout_seconds=None).open_batch() as batch:
        for number, item in enumerate(items("1", "nan", "raise no such luck")):
            batch.add(2 - number, item)
        with pytest.raises(AssertionError, match="item 2 was added before"):
            batch.add(2, *items("1"))
        found = batch.finish()
    assert [found[number].reward for number in range(3)] == [None, None, 1]
    assert found[0].failure == "RuntimeError: no such luck"


def wait_for_end(pid: int) -> None:
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll; the test's own time limit is the end of it."""
    while not condition():
        time.sleep(0.02)
