"""Reward functions that misbehave, and pools that run them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from infra.rewards import RewardScorer
from infra.rewards.open import open_reward_scorer
from infra.rewards.pool import RewardPool
from rl_core.rewards import RewardItem, RewardOutcome
from schemas.config.reward import FunctionReward
from tests.support.progress import wait_until

LIMIT_SECONDS = 3.0  # a thousand times what a reward that doesn't hang takes
LATE = RewardOutcome(None, failure=f"TimeoutError: no answer within {LIMIT_SECONDS:g} s")

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
        re.match(r"(a+)+$", "a" * 60 + "b")  # never releases the interpreter
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
    if word == "reads":
        return float(len(sys.stdin.read()) + len(subprocess.run(["cat"], capture_output=True).stdout))
    if word == "forks":
        if os.fork() == 0:
            if rest == "badly":
                raise ValueError("in the fork")
            return 9.0
        return float(os.waitstatus_to_exitcode(os.wait()[1]))
    if word == "loops":
        run = asyncio.run if rest == "alone" else asyncio.get_event_loop().run_until_complete
        return float(run(asyncio.sleep(0.01, 5)))
    if word == "cancels":
        raise asyncio.CancelledError
    if word == "interrupts":
        raise KeyboardInterrupt
    if word == "exits":
        sys.exit(4)
    return float(rest or word)

def score(prompt, completion, answer, info):
    log(completion)
    return misbehave(completion)

num_calls = 0
all_called = asyncio.Event()

async def wait(prompt, completion, answer, info):
    global num_calls
    log(completion)
    num_calls += 1
    if num_calls == 100:
        all_called.set()
    if completion.startswith("wait"):
        await asyncio.sleep(600)
    if completion.startswith("overlap"):
        await all_called.wait()
    await asyncio.sleep(0.1)
    if completion == "cancel own":
        asyncio.current_task().cancel()
        await asyncio.sleep(600)
    return {"reward": misbehave(completion), "index": info["index"]}

async def busy(prompt, completion, answer, info):
    await asyncio.sleep(0)
    time.sleep(0.1)
    await asyncio.sleep(0)
    return float(completion)

async def in_thread(prompt, completion, answer, info):
    return await asyncio.to_thread(misbehave, completion)

def modules(prompt, completion, answer, info):
    return {"reward": 0, **{name: name in sys.modules for name in ("torch", "transformers", "ray", "numpy", "pyarrow")}}

def pid(prompt, completion, answer, info):
    return os.getpid()
"""

OpenPool = Callable[..., RewardPool]


@contextmanager
def opened_pools() -> Iterator[OpenPool]:
    """Hold a function that opens pools (one process, `LIMIT_SECONDS`) and close them afterwards."""
    pools = []

    def open_one(name: str = "score", **changes: object) -> RewardPool:
        fields = {"path": f"pool_rewards:{name}", "num_processes": 1, "timeout_seconds": LIMIT_SECONDS}
        pools.append(open_reward_scorer(FunctionReward.model_validate(fields | changes)))
        return pools[-1]

    try:
        yield open_one
    finally:
        for pool in pools:
            pool.close()


def items(*completions: str) -> list[RewardItem]:
    return [RewardItem("?", completion, "!", {"index": index}) for index, completion in enumerate(completions)]


def rewards(scorer: RewardScorer, *completions: str) -> list[float | None]:
    return [outcome.reward for outcome in scorer.score(items(*completions))]


def failures(scorer: RewardScorer, *completions: str) -> list[str | None]:
    return [outcome.failure for outcome in scorer.score(items(*completions))]


def wait_for_exit(pid: int) -> None:
    wait_until(lambda: has_exited(pid))


def has_exited(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
