"""The lifetime of reward processes: what they import, and when they end."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.rewards.open import open_reward_scorer
from infra.rewards.pool import RewardPool
from schemas.config.reward import FunctionReward
from tests.support.progress import wait_until
from tests.support.reward_pools import LATE, OpenPool, failures, items, rewards, wait_for_exit


def test_a_process_imports_no_more_than_the_reward_does(open_pool: OpenPool) -> None:
    (outcome,) = open_pool("modules").score(items(""))
    assert outcome.parts == dict.fromkeys(("torch", "transformers", "ray", "numpy", "pyarrow"), 0.0)


def test_a_rewards_child_processes_are_killed_with_it(open_pool: OpenPool, reward_calls: Path) -> None:
    pool = open_pool()
    assert failures(pool, "start") == [LATE.failure]
    wait_for_exit(int(Path(f"{reward_calls}.pid").read_text()))


def test_close_kills_all_processes(open_pool: OpenPool) -> None:
    pool = open_pool(num_processes=2)
    pids = pool.pids
    assert all(psutil.pid_exists(pid) for pid in pids)
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    pool.close()


@pytest.mark.usefixtures("reward_calls")
def test_a_garbage_collected_pool_kills_its_processes() -> None:
    pool = open_reward_scorer(FunctionReward(path="pool_rewards:score", num_processes=1))
    assert isinstance(pool, RewardPool)
    assert rewards(pool, "1") == [1]
    pids = pool.pids
    del pool
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("how", ["killed", "ended"])
@pytest.mark.parametrize("completion", ["spin", "start", "1"])
def test_the_processes_end_with_their_parent(reward_calls: Path, how: str, completion: str) -> None:
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
        wait_until(lambda: reward_calls.exists() and reward_calls.read_text() == f"{completion}\n")
        if completion == "start":
            child = Path(f"{reward_calls}.pid")
            wait_until(lambda: child.exists() and child.read_text() != "")
            pids.append(int(child.read_text()))
        if how == "killed":
            parent.kill()
        else:
            parent.stdin.close()
        for pid in pids:
            wait_for_exit(pid)
