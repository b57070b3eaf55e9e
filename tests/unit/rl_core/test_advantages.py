"""Advantages, computed by hand."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.advantages import compute_advantages
from rl_core.advantages.base import AdvantageInputs, Parts, number_groups
from rl_core.advantages.turn_level import Turns, advantages_of_turns
from schemas.config.advantage import (
    AdvantageConfig,
    DrGrpoAdvantage,
    GdpoAdvantage,
    GrpoAdvantage,
    MaxRlAdvantage,
    OpoAdvantage,
    ReinforcePlusPlusAdvantage,
    RlooAdvantage,
    TurnLevelAdvantage,
)
from schemas.config.kinds import configs_of
from tests.support.configs import kinds_of

every_estimator = pytest.mark.parametrize(
    "config", [config() for config in configs_of(AdvantageConfig)], ids=kinds_of(AdvantageConfig)
)

# Group 7: 1, 0, 0, 1 has mean 0.5 and sample variance 1/3. Group 2: 2, 4 has mean 3 and variance 2.
REWARDS = [1.0, 2.0, 0.0, 0.0, 4.0, 1.0]
GROUPS = [7, 2, 7, 7, 2, 7]


def advantages_of(
    config: AdvantageConfig,
    rewards: list[float],
    groups: list[int],
    lengths: list[int] | None = None,
    loss_tokens: list[int] | None = None,
    parts: Parts = (),
) -> np.ndarray:
    response_lengths = np.array([1] * len(rewards) if lengths is None else lengths)
    return compute_advantages(
        np.array(rewards),
        np.array(groups, dtype=np.int64),
        config,
        response_lengths=response_lengths,
        loss_tokens=response_lengths if loss_tokens is None else np.array(loss_tokens),
        parts=parts,
    )


def test_grpo_by_hand() -> None:
    advantages = advantages_of(GrpoAdvantage(epsilon=1e-6), REWARDS, GROUPS)
    a, b = 0.5 / (np.sqrt(1 / 3) + 1e-6), 1 / (np.sqrt(2) + 1e-6)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, [a, -b, -a, -a, b, a], rtol=1e-6)


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    advantages = advantages_of(GrpoAdvantage(epsilon=1.0), [2.0, 4.0], [0, 0])
    np.testing.assert_allclose(advantages, [-1 / (np.sqrt(2) + 1), 1 / (np.sqrt(2) + 1)], rtol=1e-6)


def of_turns(rewards: list[float], groups: list[int], turns: list[list[float]]) -> list[list[float]]:
    """Return the advantages of turns whose rewards are `turns`, per row."""
    ones = np.ones(len(rewards), dtype=np.int64)
    inputs = AdvantageInputs.from_rows(
        np.array(rewards), np.array(groups, dtype=np.int64), response_lengths=ones, loss_tokens=ones
    )
    counts = np.array([len(row) for row in turns])
    found = advantages_of_turns(TurnLevelAdvantage(), inputs, Turns(counts, np.concatenate(turns)))
    assert found.dtype == np.float32
    return [part.tolist() for part in np.split(found, np.cumsum(counts)[:-1])]


def test_turn_level_by_hand() -> None:
    # The returns of the group's turns: 3, 2, 2; 1, 1; 2. Its rewards 3, 1, 2 have standard deviation 1.
    found = of_turns([3.0, 1.0, 2.0], [4, 4, 4], [[1.0, 0.0, 2.0], [0.0, 1.0], [2.0]])
    for row, expected in zip(found, ([1.0, 0.5, 0.0], [-1.0, -0.5], [0.0]), strict=True):
        assert row == pytest.approx(expected, abs=2e-6)


def test_what_a_reward_has_besides_its_turns_is_the_last_turns() -> None:
    # Returns 4, 3 and 0, 0: rewards shaped by other parts, such as a penalty.
    found = of_turns([4.0, 0.0], [0, 0], [[1.0, 1.0], [0.0, 1.0]])
    deviation = np.sqrt(8.0)
    assert found[0] == pytest.approx([2 / deviation, 1.5 / deviation], abs=1e-6)
    assert found[1] == pytest.approx([-2 / deviation, -1.5 / deviation], abs=1e-6)


def test_single_turns_have_grpo_advantages_and_equal_rewards_none() -> None:
    rewards, groups = [*REWARDS, 0.1, 0.1], [*GROUPS, 9, 9]
    expected = advantages_of(GrpoAdvantage(), rewards, groups).tolist()
    assert of_turns(rewards, groups, [[0.3]] * 8) == [[value] for value in expected]
    assert of_turns([1.0, 1.0], [0, 0], [[1.0, 0.0], [0.0, 1.0]]) == [[0.0, 0.0], [0.0, 0.0]]


def test_dr_grpo_is_the_centered_reward() -> None:
    assert advantages_of(DrGrpoAdvantage(), REWARDS, GROUPS).tolist() == [0.5, -1.0, -0.5, -0.5, 1.0, 0.5]


def test_max_rl_divides_by_the_mean_reward() -> None:
    # Means 1/2 and 3; then 1/4.
    assert advantages_of(MaxRlAdvantage(), REWARDS, GROUPS).tolist() == pytest.approx([1, -1 / 3, -1, -1, 1 / 3, 1])
    assert advantages_of(MaxRlAdvantage(), [1.0, 0.0, 0.0, 0.0], [0] * 4).tolist() == [3.0, -1.0, -1.0, -1.0]


def test_max_rl_is_zero_where_the_mean_reward_is_not_positive() -> None:
    assert advantages_of(MaxRlAdvantage(), [1.0, -1.0, 0.0, -2.0], [0, 0, 1, 1]).tolist() == [0.0] * 4


def test_gdpo_in_numpy() -> None:
    # Two groups; a reward of 0 or 1, one of thousands, and a third that is equal in the first group.
    right, length, form = (
        [1.0, 0.0, 1.0, 0.0, 0.0, 1.0],
        [900.0, 1300.0, 2700.0, 100.0, 100.0, 400.0],
        [1.0] * 4 + [0, 1.0],
    )
    groups, weights, eps = [0, 0, 0, 1, 1, 1], [1.3, -0.3, 0.7], 1e-6
    sums = np.zeros(6)
    for weight, part in zip(weights, (right, length, form), strict=True):
        for rows in (slice(0, 3), slice(3, 6)):
            own = np.array(part[rows])
            sums[rows] += weight * (own - own.mean()) / (own.std(ddof=1) + eps)
    expected = (sums - sums.mean()) / (sums.std(ddof=1) + eps)
    parts = [(weight, np.array(part)) for weight, part in zip(weights, (right, length, form), strict=True)]
    total = sum(weight * part for weight, part in parts)
    found = advantages_of(GdpoAdvantage(epsilon=eps), list(total), groups, parts=parts)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    scaled = [parts[0], (-0.3, 1000 * parts[1][1]), parts[2]]  # the scale of a part doesn't count
    np.testing.assert_allclose(advantages_of(GdpoAdvantage(), [0.0] * 6, groups, parts=scaled), expected, rtol=1e-5)


def test_gdpo_learns_from_a_group_of_equal_sums() -> None:
    columns = [0.0, 1.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 3.0, 3.0], [2.0, 1.0, 0.0, 0.0, 0.0]
    parts = [(1.0, np.array(column)) for column in columns]
    found = advantages_of(GdpoAdvantage(), [2.0, 2.0, 2.0, 5.0, 5.0], [0, 0, 0, 1, 1], parts=parts)
    assert (found[:3] != 0).all()
    assert found[3:].tolist() == [0.0, 0.0]  # each part is equal
    # Without parts, the rewards are the only one: GRPO's advantages, normalized.
    grpo = advantages_of(GrpoAdvantage(), REWARDS, GROUPS).astype(np.float64)
    whitened = (grpo - grpo.mean()) / grpo.std(ddof=1)
    np.testing.assert_allclose(advantages_of(GdpoAdvantage(), REWARDS, GROUPS), whitened, rtol=1e-5)


def test_rloo_has_a_leave_one_out_baseline() -> None:
    # In 1, 0, 0, 1, the others of a 1 have mean 1/3, those of a 0 have 2/3. In 2, 4 the only other one is the mean.
    expected = [2 / 3, -2.0, -2 / 3, -2 / 3, 2.0, 2 / 3]
    np.testing.assert_allclose(advantages_of(RlooAdvantage(), REWARDS, GROUPS), expected, rtol=1e-6)


def test_reinforce_plus_plus_whitens_over_tokens() -> None:
    # Centered: 0.5, -0.5 and 1, -1, with 3, 1, 1 and 1 trained tokens: a mean of (1.5 - 0.5 + 1 - 1) / 6 = 1/6, squares
    # that add up to 3/4 + 1/4 + 1 + 1 = 3, so a sample variance of (3 - 6/36) / 5 = 17/30.
    rewards, groups, tokens = [1.0, 0.0, 3.0, 1.0], [0, 0, 1, 1], [3, 1, 1, 1]
    config = ReinforcePlusPlusAdvantage(epsilon=1e-8)
    std = np.sqrt(17 / 30)
    expected = np.array([0.5 - 1 / 6, -0.5 - 1 / 6, 1 - 1 / 6, -1 - 1 / 6]) / std
    np.testing.assert_allclose(
        advantages_of(config, rewards, groups, loss_tokens=tokens, lengths=[9] * 4), expected, 1e-6
    )
    # The weights are numbers of tokens: the result is the same as if each token were a row.
    per_token = np.repeat([0.5, -0.5, 1.0, -1.0], tokens)
    assert per_token.std(ddof=1) == pytest.approx(std)


def test_zero_variance_groups_count_in_whitening_but_stay_zero() -> None:
    # Token values 1, -1, 0, 0: mean 0, sample variance 2/3.
    advantages = advantages_of(ReinforcePlusPlusAdvantage(), [3.0, 1.0, 5.0, 5.0], [0, 0, 1, 1])
    np.testing.assert_allclose(advantages, [np.sqrt(1.5), -np.sqrt(1.5), 0.0, 0.0], rtol=1e-6)
    assert advantages[2:].tolist() == [0.0, 0.0]
    # Here the mean over the tokens is not 0, but (3 - 1) / 6; the zero-variance group's advantages are.
    uneven = advantages_of(ReinforcePlusPlusAdvantage(), [3.0, 1.0, 5.0, 5.0], [0, 0, 1, 1], [3, 1, 1, 1])
    assert uneven[2:].tolist() == [0.0, 0.0]


@every_estimator
def test_rewards_that_are_equal_up_to_rounding_have_no_variance(config: AdvantageConfig) -> None:
    """Sums of the same parts in another order differ in the last bit of a float32."""
    equal = [0.99999994, 1.0, 1.0, -1e6, -1e6 - 0.0625, 0.1 + 0.2 - 0.3, 0.0]  # the last parts cancel but for 5.6e-17
    assert advantages_of(config, equal, [0, 0, 0, 1, 1, 2, 2]).tolist() == [0.0] * 7
    small = advantages_of(config, [1e-8, 2e-8, 0.0, 1e-11], [0, 0, 1, 1])  # their own scale counts
    assert (np.abs(small) > 0).all()


def test_reinforce_plus_plus_without_trained_tokens_or_variance() -> None:
    config = ReinforcePlusPlusAdvantage()
    assert advantages_of(config, [1.0, 0.0], [0, 0], [2, 2], loss_tokens=[0, 0]).tolist() == [0.0, 0.0]
    assert advantages_of(config, [1.0, 0.0], [0, 0], [2, 2], loss_tokens=[2, 0]).tolist() == [0.0, 0.0]


def test_opo_weighs_the_baseline_by_length() -> None:
    # (3 * 1 + 1 * 0) / 4 = 0.75 and (1 * 2 + 2 * 5) / 3 = 4; loss tokens don't matter.
    advantages = advantages_of(
        OpoAdvantage(), [1.0, 0.0, 2.0, 5.0], [0, 0, 1, 1], [3, 1, 1, 2], loss_tokens=[0, 1, 1, 1]
    )
    assert advantages.tolist() == [0.25, -0.75, -2.0, 1.0]


def test_opo_of_empty_responses_is_finite() -> None:
    assert advantages_of(OpoAdvantage(), [1.0, 0.0], [0, 0], [0, 0]).tolist() == [0.5, -0.5]


@every_estimator
def test_singletons_and_equal_rewards_have_no_advantage(config: AdvantageConfig) -> None:
    # The mean of three 0.1 in float64 isn't 0.1, so only a test of equality gives exactly 0.
    rewards, groups = [5.0, 0.1, 0.1, 0.1, 1.0, 0.0], [0, 1, 1, 1, 2, 2]
    advantages = advantages_of(config, rewards, groups, [3, 1, 4, 1, 5, 9])
    assert advantages[:4].tolist() == [0.0] * 4
    assert (advantages[4:] != 0).all()
    assert advantages_of(config, rewards[:4], groups[:4]).tolist() == [0.0] * 4


@every_estimator
@given(
    rows=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3), st.integers(1, 9)), min_size=1),
    seed=st.integers(0, 2**16),
)
def test_advantages_are_permuted_with_rows_and_ordered_by_reward(
    config: AdvantageConfig, rows: list[tuple[float, int, int]], seed: int
) -> None:
    rewards, groups, lengths = map(list, zip(*rows, strict=True))
    advantages = advantages_of(config, rewards, groups, lengths)
    order = np.random.default_rng(seed).permutation(len(rows))
    shuffled = advantages_of(config, *(list(np.array(column)[order]) for column in (rewards, groups, lengths)))
    np.testing.assert_allclose(shuffled, advantages[order], rtol=1e-5, atol=1e-6)
    for group in set(groups):
        members = [row for row in range(len(rows)) if groups[row] == group]
        ranked = sorted(members, key=lambda row: rewards[row])
        assert all(advantages[low] <= advantages[high] for low, high in pairwise(ranked))


@every_estimator
def test_no_rows(config: AdvantageConfig) -> None:
    assert advantages_of(config, [], []).shape == (0,)


def test_failed_rewards_are_rejected() -> None:
    with pytest.raises(ValueError, match="row 1 has reward nan"):
        advantages_of(GrpoAdvantage(), [1.0, np.nan], [0, 0])


def test_rows_must_agree() -> None:
    with pytest.raises(ValueError, match="1-D of one length"):
        advantages_of(GrpoAdvantage(), [1.0] * 3, [0, 0])
    with pytest.raises(ValueError, match="row 1 has 3 loss tokens, expected from 0 to its 2 response tokens"):
        advantages_of(GrpoAdvantage(), [1.0, 0.0], [0, 0], [2, 2], loss_tokens=[2, 3])


@given(st.lists(st.integers(-5, 5) | st.integers(-(2**40), 2**40)))
def test_groups_are_numbered_in_the_order_of_their_ids(ids: list[int]) -> None:
    order = sorted(set(ids))
    assert number_groups(np.array(ids, dtype=np.int64)).tolist() == [order.index(each) for each in ids]
