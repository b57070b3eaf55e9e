"""The variables that torch and Ray read when they are imported: set before that in every process; a user's own win."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.__main__ import COMMANDS
from infra.variables import LOCAL_RAY_VARIABLES, RAY_VARIABLES, TORCH_VARIABLES, chosen_variables

ROOT = Path(__file__).parents[3]
PROCESSES = (  # what the processes of a command, of a deployment and of a run import first
    *("flows.cli.main", "flows.deployments.execute", "flows.train", "tasks.advantage", "infra.workers.policy"),
    *("infra.workers.rollout", "infra.workers.reward", "infra.engines.vllm.start"),
)
BENCHMARKS = tuple(module for module, _ in COMMANDS.values())
# Imports each module in a child, which tells of the variables at its first import of torch or of Ray, and ends there.
SCRIPT = """
import importlib, json, os, sys

def tell(library):
    print(json.dumps([entry, library, {name: os.environ.get(name) for name in sys.argv[1].split(",")}]), flush=True)
    os._exit(0)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "ray"):
            tell(name)

for entry in sys.argv[2:]:
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    sys.meta_path.insert(0, Finder())
    importlib.import_module(entry)
    tell("")
"""


def at_first_import(names: Sequence[str], entries: Sequence[str], **given: str) -> dict[str, tuple[str, dict]]:
    """Return, for each module, the library of the two that it imports first ("" for none), and the variables then."""
    own = ("OMP_", "GOMP_", "RAY_", "REPORTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = [sys.executable, "-c", SCRIPT, ",".join(names), *entries]
    environment = kept | {"PYTHONPATH": str(ROOT)} | given
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = {entry: (library, values) for entry, library, values in map(json.loads, done.stdout.splitlines())}
    assert list(found) == list(entries), done.stderr
    return found


@pytest.mark.parametrize(
    ("entries", "variables"),
    [(PROCESSES, TORCH_VARIABLES | RAY_VARIABLES), (BENCHMARKS, TORCH_VARIABLES | RAY_VARIABLES | LOCAL_RAY_VARIABLES)],
    ids=["processes", "benchmarks"],
)
def test_they_are_set_before_torch_and_ray_are_imported(entries: Sequence[str], variables: dict[str, str]) -> None:
    found = at_first_import(list(variables), entries)
    assert "torch" in {library for library, _ in found.values()}
    assert {entry: values for entry, (_, values) in found.items()} == dict.fromkeys(entries, variables)


def test_a_users_own_value_wins() -> None:
    found = at_first_import(list(TORCH_VARIABLES), ["infra.workers.policy"], OMP_WAIT_POLICY="active")
    assert found["infra.workers.policy"][1] == {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": None}
    found = at_first_import(list(TORCH_VARIABLES), ["infra.workers.policy"], GOMP_SPINCOUNT="0")
    assert found["infra.workers.policy"][1] == TORCH_VARIABLES | {"GOMP_SPINCOUNT": "0"}


def test_a_clusters_workers_get_only_what_the_user_has_set_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", TORCH_VARIABLES["OMP_WAIT_POLICY"])
    assert chosen_variables() == {}
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert chosen_variables() == {"OMP_WAIT_POLICY": "active"}
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert chosen_variables() == {}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"NO_PROXY": "example.org"}, "example.org,127.0.0.1,localhost"),
        ({"no_proxy": "localhost", "NO_PROXY": "example.org"}, "localhost,127.0.0.1"),
    ],
)
def test_a_proxy_is_not_asked_for_this_machine(own: dict[str, str], expected: str) -> None:
    script = """
import os, urllib.request
import infra
assert urllib.request.proxy_bypass("127.0.0.1"), os.environ
assert not urllib.request.proxy_bypass("example.com")
print(os.environ["no_proxy"], os.environ["NO_PROXY"])
"""
    kept = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    environment = kept | {"HTTP_PROXY": "http://127.0.0.1:9"} | own
    command = [sys.executable, "-c", script]
    printed = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    assert printed.split() == [expected, expected]
