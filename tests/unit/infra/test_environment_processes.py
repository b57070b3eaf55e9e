"""The lifetime of environment processes: what they import, and when they end."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.environments.pool import EnvironmentClass, EnvironmentPool
from schemas.config.environment import TurnLimits
from tests.support.environment_pools import MODULE, open_rows, opened
from tests.support.progress import wait_until
from tests.support.reward_pools import wait_for_exit

IMPORTING = """
import infra.processes.lifeline

class Importing:
    def __init__(self, task, seed):
        pass

    def reset(self):
        return infra.processes.lifeline.__name__

    def step(self, action):
        return "", 0.0, True
"""


def test_a_process_imports_no_more_than_the_class_does() -> None:
    with opened("Modules") as pool:
        assert open_rows(pool, "")[0].observations == ()


def test_a_class_may_import_the_modules_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "importing.py").write_text(IMPORTING)
    monkeypatch.syspath_prepend(tmp_path)
    pool = EnvironmentPool(EnvironmentClass("importing:Importing", TurnLimits(num_processes=1)))
    pool.start()
    try:
        pool.open(0, {"prompt": [], "answer": "", "info": {}}, 0)
        assert pool.wait()[0].observations == ("infra.processes.lifeline",)
    finally:
        pool.close()


def test_close_kills_all_processes() -> None:
    with opened("Counting", num_processes=2) as pool:
        pids = pool.pids
        assert all(psutil.pid_exists(pid) for pid in pids)
        open_rows(pool, *"ab")
        pool.step(0, "spin")
        pool.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert pool.pids == []


def test_a_garbage_collected_pool_kills_its_processes() -> None:
    pool = EnvironmentPool(EnvironmentClass(f"{MODULE}:Counting", TurnLimits(num_processes=1)))
    pool.start()
    open_rows(pool, "")
    pids = pool.pids
    del pool
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("how", ["killed", "ended"])
@pytest.mark.parametrize("action", ["spin", "child", "1"])
def test_the_processes_end_with_their_parent(tmp_path: Path, how: str, action: str) -> None:
    log = tmp_path / "pid"
    program = f"""
import sys
from infra.environments.pool import EnvironmentClass, EnvironmentPool
from schemas.config.environment import TurnLimits

pool = EnvironmentPool(EnvironmentClass("{MODULE}:Counting", TurnLimits(num_processes=2), {{"log": {str(log)!r}}}))
pool.start()
pool.open(0, {{"answer": ""}}, 0)
pool.wait()
pool.step(0, {action!r})
print(*pool.pids, flush=True)
sys.stdin.readline()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, os.getcwd()]))}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if action == "child":
            wait_until(lambda: log.exists() and log.read_text() != "")
            pids.append(int(log.read_text()))
        if how == "killed":
            parent.kill()
        else:
            parent.stdin.close()
        for pid in pids:
            wait_for_exit(pid)
