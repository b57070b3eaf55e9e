"""A folder next to the config with files named like Sluice's packages, or like modules that they import."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.ray.module_path import INSTALLATION

PACKAGES = ("schemas", "rl_core", "infra", "tasks", "flows")
HOSTILE = (*PACKAGES, "json", "numpy", "random", "typing_extensions")

REWARD = """
import my_words

def score(prompt, completion, answer, info):
    return float(completion in my_words.WORDS)
"""

DRIVER = """
import json, sys
sys.path.append(sys.argv[1])
from infra.ray.module_path import append_working_directory

sys.path.pop()  # as in an editable install, whose own finder is asked after `sys.path`
append_working_directory()
sys.path.insert(-1, sys.argv[2])  # as a user's script or notebook does


def probe():
    import importlib, os, sys
    import numpy, random, typing_extensions
    from infra.rewards.pool import RewardPool
    from schemas.config.reward import FunctionReward
    from rl_core.rewards import load_reward

    files = {name: importlib.import_module(name).__file__ for name in ("schemas", "rl_core", "infra", "tasks", "flows")}
    config = FunctionReward(path="my_reward:score", num_processes=1)
    pool = RewardPool(config)
    pool.start()
    try:
        pool.wait_until_ready()  # the reward is loaded in a process of its own
    finally:
        pool.close()
    reward = load_reward(config)("", "good", "", {})
    path = {"last": sys.path[-1], "count": sys.path.count(sys.path[-1])}
    return {"files": files, "reward": reward, "working directory": os.getcwd(), **path}


class Probe:
    def probe(self):
        return probe()


if __name__ == "__main__":
    found = {"driver": probe()}
    if len(sys.argv) > 3:
        import ray
        from infra.ray.actors import create_actor, kill_actors
        from infra.ray.cluster import connect

        connect(sys.argv[3])
        found["task"] = ray.get(ray.remote(num_cpus=0)(probe).remote())
        found["actor"] = ray.get(ray.remote(num_cpus=0)(Probe).remote().probe.remote())
        found["detached actor"] = ray.get(create_actor("module-path-probe", Probe).probe.remote())
        kill_actors(["module-path-probe"])
    print(json.dumps(found))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in HOSTILE:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('the {name} next to the config was imported')\n")
    (tmp_path / "my_reward.py").write_text(REWARD)
    own = tmp_path.parent / f"{tmp_path.name}-own"  # which the driver adds to its path
    shutil.copytree(tmp_path, own)
    (own / "my_reward.py").unlink()
    (own / "my_words.py").write_text("WORDS = ['good']\n")
    (tmp_path.parent / f"{tmp_path.name}-driver.py").write_text(DRIVER)
    return tmp_path


def run_driver(folder: Path, *arguments: str) -> dict[str, dict[str, object]]:
    """Run `DRIVER` in the folder; at its start, the folder is not on its module path, as for the installed command."""
    command = [sys.executable, "-P", str(folder.parent / f"{folder.name}-driver.py"), INSTALLATION]
    command += [str(folder.parent / f"{folder.name}-own"), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict[str, object], folder: Path) -> None:
    assert found["files"] == {name: f"{INSTALLATION}/{name}/__init__.py" for name in PACKAGES}
    assert found["reward"] == 1.0
    assert found["working directory"] == os.path.realpath(folder)
    assert (found["last"], found["count"]) == (os.path.realpath(folder), 1)
