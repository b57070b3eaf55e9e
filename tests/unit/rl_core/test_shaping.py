"""Reward shaping, computed by hand."""

import numpy as np
import pytest

from rl_core.advantages import compute_advantages
from rl_core.advantages.shaping import ShapedRows, overlong_penalties, shape_rows
from schemas.config.advantage import DrGrpoAdvantage, OverlongConfig
from schemas.config.loss import KlConfig
from schemas.errors import NonFiniteError
from schemas.metrics import Mean

LENGTHS = np.array([4, 8, 9, 10])
REWARDS = np.array([1.0, 0.0, 1.0, 0.0])


def shaped(
    row_kl: list[float] | None = None, overlong: dict[str, float | bool] | None = None, **kl: float | bool
) -> ShapedRows:
    """Shape four rows of at most ten tokens, the last of them truncated; one token of each isn't trained."""
    return shape_rows(
        REWARDS,
        response_lengths=LENGTHS,
        loss_tokens=LENGTHS - 1,
        is_truncated=np.array([False, False, False, True]),
        row_kl=row_kl,
        overlong=OverlongConfig(**(overlong or {})),
        kl=KlConfig(**kl),
        max_response_tokens=10,
    )


def test_by_default_rows_stay_as_they_are() -> None:
    rows = shaped(coef=0.1)
    assert rows.rewards.tolist() == REWARDS.tolist()
    assert rows.loss_tokens.tolist() == [3, 7, 8, 9]
    assert rows.metrics == {}


def test_the_overlong_penalty_grows_over_the_buffer() -> None:
    lengths, config = np.array([0, 6, 7, 8, 9, 10]), OverlongConfig(buffer_tokens=4, penalty=2.0)
    assert overlong_penalties(lengths, config, max_response_tokens=10).tolist() == [0.0, 0.0, 0.5, 1.0, 1.5, 2.0]
    rows = shaped(overlong={"buffer_tokens": 4, "penalty": 2.0})
    assert rows.rewards.tolist() == [1.0, -1.0, -0.5, -2.0]
    assert rows.metrics["overlong/penalty"] == Mean(total=4.5, weight=4)
    assert rows.metrics["reward/shaped"] == Mean(total=-2.5, weight=4)


def test_a_buffer_longer_than_responses_is_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"overlong\.buffer_tokens = 11 is more than rollout\.max_response_tokens = 10"
    ):
        shaped(overlong={"buffer_tokens": 11})
    assert shaped(overlong={"buffer_tokens": 10}).rewards[3] == -1.0


def test_kl_in_the_reward() -> None:
    rows = shaped([0.0, 2.0, -1.0, 10.0], coef=0.5, in_reward=True)
    assert rows.rewards.tolist() == [1.0, -1.0, 1.5, -5.0]
    assert rows.metrics["reward/kl"] == Mean(total=11.0, weight=4)
    assert rows.metrics["reward/shaped"] == Mean(total=-3.5, weight=4)
    # Without a coefficient there is no reference model, and no KL is required.
    assert shaped(None, in_reward=True).metrics == {}


def test_kl_in_the_reward_must_be_finite_for_all_rows() -> None:
    for row_kl in (None, [0.0]):
        with pytest.raises(ValueError, match=r"kl\.in_reward needs the KL of all 4 rows"):
            shaped(row_kl, coef=0.5, in_reward=True)
    with pytest.raises(NonFiniteError, match="the KL of row 2 to the reference is nan") as caught:
        shaped([0.0, 0.0, np.nan, 0.0], coef=0.5, in_reward=True)
    assert caught.value.rows == (2,)


def test_masked_rows_still_count_in_the_baseline() -> None:
    rows = shaped(overlong={"mask_truncated": True})
    assert rows.loss_tokens.tolist() == [3, 7, 8, 0]
    assert rows.rewards.tolist() == REWARDS.tolist()
    assert rows.metrics == {"overlong/masked": Mean(total=1.0, weight=4)}
    advantages = compute_advantages(
        rows.rewards,
        np.zeros(4, dtype=np.int64),
        DrGrpoAdvantage(),
        response_lengths=LENGTHS,
        loss_tokens=rows.loss_tokens,
    )
    assert advantages.tolist() == [0.5, -0.5, 0.5, -0.5]
