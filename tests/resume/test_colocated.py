"""A colocated run whose engine dies at wake-up and asleep, and its driver too: the weights of a separate run."""

import pytest

from infra.models.load import load_model
from schemas.config.model import ModelConfig
from tests.run_results import Run
from tests.services import Command, Workplace

pytestmark = pytest.mark.slow

STEPS = 5
REWARDS = '''
import os, pathlib, signal

from infra.engines.transformers import TransformersEngine
from tiny_rewards import short

wake = TransformersEngine.wake

def wake_or_die(self, tags):
    """Wake up, or kill this worker, once, if a test has asked for it."""
    order = pathlib.Path("die-at-wake-up")
    if order.exists():
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return wake(self, tags)

TransformersEngine.wake = wake_or_die
'''
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", "reward.path=colocated_rewards:short", "reward.num_processes=0"),
    "reward.timeout_seconds=inf",
    *("runtime.num_policy_ranks=2", "eval.every_steps=3", "checkpoint.every_steps=1"),
)


@pytest.fixture(scope="module")
def separate(workplace: Workplace) -> Run:
    """An undisturbed run whose workers keep all that they hold."""
    (workplace.folder / "colocated_rewards.py").write_text(REWARDS)
    workplace.sluice(*CONFIG, "--run-id", "separate")
    return workplace.run("separate")


@pytest.fixture(scope="module")
def killed(workplace: Workplace, separate: Run) -> Command:
    """A run whose engine dies at its first wake-up, and asleep; and whose driver is killed while it sleeps."""
    order = workplace.folder / "die-at-wake-up"
    order.touch()
    driver = workplace.start(*CONFIG, "runtime.placement=colocated", "runtime.max_restarts=0", "--run-id", "colocated")
    run = workplace.run("colocated")
    driver.wait_for(lambda: run.committed(0, "reference"))
    assert not order.exists()
    assert workplace.kill_worker("RolloutWorker") == 1
    driver.wait_for(lambda: run.committed(2, "put"))
    driver.kill()
    return driver


@pytest.fixture(scope="module")
def colocated(workplace: Workplace, killed: Command) -> Run:
    """The same run, resumed to its end; the engine dies when it wakes up for the first time."""
    (workplace.folder / "die-at-wake-up").touch()
    printed = workplace.sluice("resume", "colocated")
    assert "workers take turns in a GPU's memory" in printed
    assert not (workplace.folder / "die-at-wake-up").exists()
    return workplace.run("colocated")


def test_a_colocated_run_ends_the_same_whatever_dies_at_wake_up(separate: Run, colocated: Run) -> None:
    assert colocated.weights(STEPS) == separate.weights(STEPS)
    assert colocated.step_metrics() == separate.step_metrics()
    assert colocated.evaluations() == separate.evaluations()
    assert {event.kind for event in colocated.metrics.events()} == {"start", "resume"}  # no step was run again


def test_each_turn_moves_the_bytes_of_the_model(workplace: Workplace, separate: Run, colocated: Run) -> None:
    model = load_model(ModelConfig(path=str(workplace.folder / "model")))
    whole = 4 * sum(weight.numel() for weight in model.parameters())
    assert separate.metrics.steps()[-1].memory_by_phase == {}
    turns = colocated.metrics.steps()[-1].memory_by_phase
    rollout, scoring, update = (turns[phase] for phase in ("rollout", "scoring", "update"))
    # The optimizer of both ranks, and their weights once they are published; then the engine's weights exist again.
    assert (rollout.moved_bytes, rollout.freed_bytes, rollout.kept_bytes) == (3 * whole, whole, 0)
    assert rollout.resident_bytes == {"reference": 0, "policy": 0, "rollout": whole}
    assert (scoring.moved_bytes, scoring.freed_bytes) == (2 * whole, whole)
    assert scoring.resident_bytes == {"rollout": 0, "policy": whole // 2, "reference": whole}
    assert (update.moved_bytes, update.freed_bytes) == (3 * whole, 0)  # the reference out, the optimizer in
    assert update.resident_bytes == {"rollout": 0, "reference": 0, "policy": 3 * whole // 2}
