"""The learning rate of an update, by its step and the updates before it."""

import math

import pytest

from rl_core.training.optimizer import learning_rate
from schemas.config.optim import OptimConfig

COSINE = OptimConfig(lr=1.0, warmup_updates=2, schedule="cosine", updates_per_step=2)


def rates(config: OptimConfig, steps: range, num_steps: int, num_updates: int = 0) -> list[float]:
    """Return the learning rates of these steps, of which the first comes after so many updates."""
    per_step = config.updates_per_step
    places = [(step, part) for step in steps for part in range(per_step)]
    return [learning_rate(config, num_updates + n, step, part, num_steps) for n, (step, part) in enumerate(places)]


def test_it_warms_up_and_is_constant() -> None:
    config = COSINE.replace(schedule="constant")
    assert rates(config, range(3), 3) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0])


def test_a_cosine_falls_from_the_warm_up_to_the_end() -> None:
    found = rates(COSINE, range(5), 5)
    assert found[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert found[6] == pytest.approx(0.5)  # update 6 of 2 to 10
    assert found[9] == pytest.approx(0.5 * (1 - 0.9238795325))
    assert found[2:] == sorted(found[2:], reverse=True)


def test_a_line_falls_from_the_warm_up_to_the_end() -> None:
    found = rates(COSINE.replace(schedule="linear"), range(5), 5)
    assert found == pytest.approx([1 / 3, 2 / 3, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


@pytest.mark.parametrize("updates_per_step", [1, 4])
def test_a_fork_with_other_updates_per_step_decays_to_its_end(updates_per_step: int) -> None:
    """Three steps with two updates each were taken over, of six."""
    fork = COSINE.replace(updates_per_step=updates_per_step, warmup_updates=0)
    found = rates(fork, range(3, 6), 6, num_updates=6)
    assert found[0] == pytest.approx(0.5)  # half of the steps are done
    assert found == sorted(found, reverse=True)
    assert 0 < found[-1] < 0.1
    assert len(set(found)) == len(found)


def test_a_fork_within_the_warm_up_of_its_own_units_is_past_its_own() -> None:
    fork = COSINE.replace(updates_per_step=1, warmup_updates=5)
    assert rates(fork, range(3, 6), 20, num_updates=6) == pytest.approx([1.0, 1.0, 1.0])


def test_no_decay_is_left_after_the_warm_up() -> None:
    assert rates(COSINE.replace(warmup_updates=6), range(3), 3)[-1] == pytest.approx(6 / 7)


@pytest.mark.parametrize("warmup_updates", [6, 10])
def test_a_fork_whose_steps_are_all_within_the_warm_up_decays_over_them(warmup_updates: int) -> None:
    """Its parent made 4 updates in each of the first 3 of 6 steps, and is past the warm-up."""
    fork = COSINE.replace(updates_per_step=1, warmup_updates=warmup_updates)
    assert rates(fork, range(3, 6), 6, num_updates=12) == pytest.approx([0.5, 0.25, (1 - math.sqrt(0.75)) / 2])
