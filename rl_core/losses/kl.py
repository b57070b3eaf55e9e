"""Estimates of the KL divergence of the policy from the reference (Schulman 2020, joschu.net/blog/kl-approx.html)."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_core.losses.base import MAX_LOG_RATIO
from schemas.config.loss import KlEstimator


def _k1(x: Tensor) -> Tensor:
    return -x


def _k2(x: Tensor) -> Tensor:
    return x.square() / 2


def _k3(x: Tensor) -> Tensor:
    clamped = x.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(clamped) - clamped


_ESTIMATORS: dict[KlEstimator, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def kl_estimate(estimator: KlEstimator, x: Tensor) -> Tensor:
    """Compute k1 = -x, k2 = x^2 / 2 or k3 = e^x - x - 1 per token, in nats.

    Over tokens sampled from the policy, the mean of k1 and k3 is KL(policy, reference), and that of k2 nearly so; k2
    and k3 are never negative. As a loss term only the gradient matters. With respect to the policy's log-prob it is 1
    for k1 (with mean 0: no pull towards the reference), -x for k2 (in the mean, the gradient of KL(policy, reference)
    of the next token) and 1 - e^x for k3 (in the mean, the gradient of KL(reference, policy)); see arXiv:2506.09477.

    Args:
        estimator: The estimator.
        x: Reference minus policy log-prob, nats; any shape. k3 clamps it to at most 20; NaN stays NaN.
    """
    return _ESTIMATORS[estimator](x)


def row_kl(
    estimator: KlEstimator,
    policy_logprobs: NDArray[np.float32],
    reference_logprobs: NDArray[np.float32],
    loss_mask: NDArray[np.bool_],
    response_lengths: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Sum the KL estimates over each row's trained tokens, for the KL in the reward: [N] nats, 0 without tokens.

    Args:
        estimator: The estimator.
        policy_logprobs: [T] nats, of the weights that sampled (the column `behavior_logprobs`).
        reference_logprobs: [T] nats.
        loss_mask: [T] the trained tokens.
        response_lengths: [N] tokens, with sum T.
    """
    row = np.repeat(np.arange(len(response_lengths)), response_lengths)[loss_mask]
    x = reference_logprobs[loss_mask].astype(np.float64) - policy_logprobs[loss_mask]
    totals = np.zeros(len(response_lengths))
    np.add.at(totals, row, kl_estimate(estimator, torch.from_numpy(x)).numpy())
    return totals
