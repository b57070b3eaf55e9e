"""Estimates of the KL divergence of the policy from the reference (Schulman 2020, joschu.net/blog/kl-approx.html)."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_core.losses.base import MAX_LOG_RATIO
from schemas.config.kl import KlEstimator


def _k1(x: Tensor) -> Tensor:
    return -x


def _k2(x: Tensor) -> Tensor:
    return x.square() / 2


def _k3(x: Tensor) -> Tensor:
    held = x.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(held) - held


_ESTIMATORS: dict[KlEstimator, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def kl_estimate(estimator: KlEstimator, x: Tensor) -> Tensor:
    """Per token: k1 = -x, k2 = x^2 / 2 or k3 = e^x - x - 1.

    For tokens sampled from the policy, k1 and k3 have the KL(policy, reference) as their mean, and k2 nearly so;
    k2 and k3 are never negative. As a loss term only the gradient counts, and that with respect to the policy's
    log-prob is 1 for k1 (its mean is 0: no pull towards the reference), -x for k2 (in the mean, the gradient of
    KL(policy, reference) of the next token) and 1 - e^x for k3 (that of KL(reference, policy)); see
    arXiv:2506.09477.

    Args:
        estimator: Which one.
        x: Reference less policy log-prob, nats; any shape. k3 holds it at 20 at most, NaN stays NaN.

    Returns:
        Nats, in the shape of `x`.
    """
    return _ESTIMATORS[estimator](x)


def row_kl(
    estimator: KlEstimator,
    policy_logprobs: NDArray[np.float32],
    reference_logprobs: NDArray[np.float32],
    loss_mask: NDArray[np.bool_],
    response_lengths: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Each row's KL, for the KL in the reward: the estimates summed over its trained tokens.

    Args:
        estimator: Which one.
        policy_logprobs: [T] nats, of the weights that sampled (the column `behavior_logprobs`).
        reference_logprobs: [T] nats.
        loss_mask: [T] what is trained.
        response_lengths: [N] tokens; they add up to T.

    Returns:
        [N] nats; 0 for a row without a trained token.
    """
    row = np.repeat(np.arange(len(response_lengths)), response_lengths)[loss_mask]
    x = reference_logprobs[loss_mask].astype(np.float64) - policy_logprobs[loss_mask]
    totals = np.zeros(len(response_lengths))
    np.add.at(totals, row, kl_estimate(estimator, torch.from_numpy(x)).numpy())
    return totals
