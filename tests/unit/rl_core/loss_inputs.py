"""Loss inputs with chosen ratios, and the loss of a few tokens."""

from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from torch import Tensor

from rl_core.losses import LossInputs, policy_loss
from schemas.config.loss import (
    Aggregation,
    CispoLoss,
    ClippedLoss,
    CorrectionConfig,
    CrossEntropyLoss,
    GspoLoss,
    KlConfig,
    LossConfig,
    MaskedCorrection,
    NoCorrection,
    SapoLoss,
    TruncatedCorrection,
)
from schemas.metrics import Mean, Metrics

LOSSES = [
    *(ClippedLoss(), ClippedLoss(dual_clip=3), GspoLoss(clip_low=0.1, clip_high=0.1), CispoLoss(), SapoLoss()),
    CrossEntropyLoss(),
]
AGGREGATIONS = get_args(Aggregation)
NO_KL, NO_CORRECTION = KlConfig(), NoCorrection()
CORRECTIONS = [NO_CORRECTION, TruncatedCorrection(cap=1.2), MaskedCorrection(level="sequence", high=2)]


def row_inputs(
    ratios: Sequence[float],
    advantages: Sequence[float],
    lengths: Sequence[int],
    mask: Sequence[bool] | None = None,
    *,
    importance: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    entropy: Sequence[float] | None = None,
) -> LossInputs:
    """Create inputs with behavior log-probs 0, policy log-probs log(ratio) and sampler log-probs -log(importance)."""
    policy = floats(ratios).log().requires_grad_()
    return LossInputs.from_rows(
        policy_logprobs=policy,
        behavior_logprobs=torch.zeros_like(policy),
        advantages=floats(advantages).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        loss_mask=torch.tensor(mask if mask is not None else [True] * len(ratios), dtype=torch.bool),
        response_lengths=torch.tensor(lengths),
        sampler_logprobs=None if importance is None else -floats(importance).log(),
        reference_logprobs=None if reference is None else floats(reference),
        entropy=None if entropy is None else floats(entropy).requires_grad_(),
    )


def floats(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def loss_of(
    inputs: LossInputs,
    num_tokens: int,
    num_sequences: int,
    loss: LossConfig | None = None,
    kl: KlConfig = NO_KL,
    correction: CorrectionConfig = NO_CORRECTION,
    **config: object,
) -> tuple[Tensor, Metrics]:
    return policy_loss(
        inputs,
        loss or ClippedLoss(**config),
        kl,
        correction,
        norm_tokens=10,
        num_loss_tokens=num_tokens,
        num_live_sequences=num_sequences,
    )


def gradient_of(inputs: LossInputs, loss: Tensor) -> list[float]:
    """Return d loss / d policy log-prob of each token."""
    loss.backward()
    assert inputs.policy_logprobs.grad is not None
    grad: list[float] = inputs.policy_logprobs.grad.tolist()
    return grad


def assert_mean(metric: object, total: float, weight: int) -> None:
    assert isinstance(metric, Mean)
    assert (metric.total, metric.weight) == (pytest.approx(total), weight)
