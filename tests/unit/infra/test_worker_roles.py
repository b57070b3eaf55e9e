"""The actors of the workers' roles: what they forward, and what a run's flows import because of them."""

import subprocess
import sys
from importlib import import_module

import pytest

from infra.workers.actor import WorkerActor
from infra.workers.launch import _CLASSES, Role


def test_the_flows_of_a_run_import_no_torch() -> None:
    code = "import sys, flows.cli.demo, flows.train; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("role", _CLASSES)
def test_every_role_has_its_workers_name_and_methods(role: Role) -> None:
    actor = _CLASSES[role]
    module, _, name = actor.worker.partition(":")  # type: ignore[attr-defined]
    worker = getattr(import_module(module), name)
    assert actor.__name__ == worker.__name__
    forwarded = {name for name in vars(actor) if not name.startswith("_")} - set(vars(WorkerActor))
    assert {name for name in forwarded if not callable(getattr(worker, name, None))} == set()
