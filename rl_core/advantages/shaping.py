"""Reward penalties and row masks that apply before advantages are computed. N rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rl_core.advantages.base import Floats, Ints
from schemas.config.advantage import OverlongConfig
from schemas.config.loss import KlConfig
from schemas.errors import NonFiniteError
from schemas.metrics import Mean, Metrics


@dataclass(frozen=True)
class ShapedRows:
    """The inputs of the advantages and the plan."""

    rewards: Floats  # [N]
    loss_tokens: Ints  # [N], trained response tokens
    metrics: Metrics = field(default_factory=dict)  # of the penalties and masks that were applied


def shape_rows(
    rewards: Floats,
    *,
    response_lengths: Ints,
    loss_tokens: Ints,
    is_truncated: NDArray[np.bool_],
    row_kl: Sequence[float] | None,
    overlong: OverlongConfig,
    kl: KlConfig,
    max_response_tokens: int,
) -> ShapedRows:
    """Apply the configured overlong penalty, KL in the reward, and overlong mask.

    A masked row still counts in its group's baseline, but has no loss tokens, so that the plan skips it and no
    denominator includes it.

    Args:
        rewards: [N] from the reward function.
        response_lengths: [N] tokens.
        loss_tokens: [N] trained response tokens before masking.
        is_truncated: [N] whether the response was cut off by the token limit.
        row_kl: [N] the KL of each row to the reference, summed over its trained tokens, in nats; required if the KL
            is in the reward.
        overlong: Penalty and mask.
        kl: Coefficient, and whether the KL is in the reward.
        max_response_tokens: The token limit.

    Returns:
        The new rewards and loss tokens, and the metrics of what applies: `reward/shaped`, `overlong/penalty` and
        `reward/kl` (nats, without the coefficient) are means over the rows, `overlong/masked` is a fraction of them.

    Raises:
        NonFiniteError: A row's KL isn't finite.
        ValueError: The penalty's buffer is longer than the token limit, or `row_kl` is missing.
    """
    shaped, trained = np.asarray(rewards, dtype=np.float64), np.asarray(loss_tokens, dtype=np.int64)
    metrics: Metrics = {}
    if overlong.buffer_tokens:
        penalties = overlong_penalties(response_lengths, overlong, max_response_tokens=max_response_tokens)
        shaped = shaped - penalties
        metrics["overlong/penalty"] = _mean(penalties)
    if kl.coef and kl.in_reward:
        divergence = _checked_kl(row_kl, len(shaped))
        shaped = shaped - kl.coef * divergence
        metrics["reward/kl"] = _mean(divergence)
    if metrics:
        metrics["reward/shaped"] = _mean(shaped)
    if overlong.mask_truncated:
        trained = np.where(is_truncated, 0, trained)
        metrics["overlong/masked"] = _mean(is_truncated)
    return ShapedRows(shaped, trained, metrics)


def overlong_penalties(response_lengths: Ints, config: OverlongConfig, *, max_response_tokens: int) -> Floats:
    """Compute DAPO's soft overlong punishment to subtract from each reward: [N] float64, from 0 to `penalty`.

    It is 0 up to `buffer_tokens` below the limit, then grows linearly to `penalty` at the limit (Yu et al. 2025,
    arXiv:2503.14476, equation 13).

    Args:
        response_lengths: [N] tokens.
        config: `buffer_tokens`, not 0, and `penalty`.
        max_response_tokens: The token limit.

    Raises:
        ValueError: The buffer is longer than the token limit.
    """
    if config.buffer_tokens > max_response_tokens:
        raise ValueError(
            f"overlong.buffer_tokens = {config.buffer_tokens} is more than rollout.max_response_tokens ="
            f" {max_response_tokens}; lower it"
        )
    excess = np.asarray(response_lengths, dtype=np.float64) - (max_response_tokens - config.buffer_tokens)
    penalties: Floats = config.penalty * np.clip(excess / config.buffer_tokens, 0.0, 1.0)
    return penalties


def _checked_kl(row_kl: Sequence[float] | None, num_rows: int) -> Floats:
    if row_kl is None or len(row_kl) != num_rows:
        raise ValueError(
            f"kl.in_reward needs the KL of all {num_rows} rows, not {None if row_kl is None else len(row_kl)}"
        )
    divergence = np.asarray(row_kl, dtype=np.float64)
    if len(wrong := np.flatnonzero(~np.isfinite(divergence))):
        raise NonFiniteError(
            f"the KL of row {wrong[0]} to the reference is {divergence[wrong[0]]}: a log-prob of the policy or of the"
            " reference isn't finite",
            tuple(wrong.tolist()),
        )
    return divergence


def _mean(values: NDArray[np.generic]) -> Mean:
    return Mean(total=float(values.sum()), weight=len(values))
