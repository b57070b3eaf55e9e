"""Advantages by hand."""

import numpy as np
import pytest

from rl_core.advantages import compute_advantages
from schemas.config.advantage import GrpoAdvantage

CONFIG = GrpoAdvantage(epsilon=1e-6)


def test_grpo_by_hand() -> None:
    # Group 7: 1, 0, 0, 1 has mean 0.5 and sample variance 1/3. Group 2: 2, 4 has mean 3 and variance 2.
    rewards = np.array([1.0, 2.0, 0.0, 0.0, 4.0, 1.0])
    group_ids = np.array([7, 2, 7, 7, 2, 7])
    advantages = compute_advantages(rewards, group_ids, CONFIG)
    a, b = 0.5 / (np.sqrt(1 / 3) + 1e-6), 1 / (np.sqrt(2) + 1e-6)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, [a, -b, -a, -a, b, a], rtol=1e-6)


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    advantages = compute_advantages(np.array([2.0, 4.0]), np.zeros(2, dtype=int), GrpoAdvantage(epsilon=1.0))
    np.testing.assert_allclose(advantages, [-1 / (np.sqrt(2) + 1), 1 / (np.sqrt(2) + 1)], rtol=1e-6)


def test_singletons_and_equal_rewards_have_no_advantage() -> None:
    # The mean of three 0.1 in float64 isn't 0.1, so only a test of equality gives exactly 0.
    rewards = np.array([5.0, 0.1, 0.1, 0.1])
    assert compute_advantages(rewards, np.array([0, 1, 1, 1]), CONFIG).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_no_rows() -> None:
    assert compute_advantages(np.empty(0), np.empty(0, dtype=int), CONFIG).shape == (0,)


def test_failed_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has reward nan"):
        compute_advantages(np.array([1.0, np.nan]), np.zeros(2, dtype=int), CONFIG)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="1-D of one length"):
        compute_advantages(np.ones(3), np.zeros(2, dtype=int), CONFIG)
