"""A mixture of experts that is trained with the experts that the engine chose: killed and resumed, it ends the same."""

import pytest

from tests.services import Workplace
from tests.tiny import make_tiny_moe

pytestmark = pytest.mark.slow

STEPS = 3
CONFIG = ("train", "tiny.toml", f"steps={STEPS}", "model.path=moe", "rollout.router_replay=true")


def test_a_killed_run_ends_in_the_same_weights(workplace: Workplace) -> None:
    make_tiny_moe(workplace.folder / "moe")
    workplace.sluice(*CONFIG, "--run-id", "experts")
    killed = workplace.run("experts-killed")
    driver = workplace.start(*CONFIG, "--run-id", "experts-killed")
    driver.wait_for(lambda: killed.passed(1, "put"))
    driver.kill()
    workplace.kill_worker("PolicyWorker")
    workplace.kill_worker("RolloutWorker")
    workplace.sluice("resume", "experts-killed")
    expected = workplace.run("experts")
    assert killed.weights(STEPS) == expected.weights(STEPS) != expected.weights(STEPS - 1)
    assert killed.step_metrics() == expected.step_metrics()
    assert expected.step_metrics()[0]["grad_norm"] > 0
