"""The losses and corrections under test, each with its plain formula; loss inputs with chosen ratios.

A new kind is a config in `LOSSES` or `CORRECTIONS`, and a formula in `POLICY_TERMS` or `WEIGHTS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_core.losses import LossInputs, policy_loss
from schemas.config.distillation import DistillationConfig
from schemas.config.loss import (
    Aggregation,
    CispoLoss,
    ClipCovLoss,
    ClippedLoss,
    CorrectionConfig,
    CrossEntropyLoss,
    DppoLoss,
    GmpoLoss,
    GspoLoss,
    KlConfig,
    KlCovLoss,
    LossConfig,
    MaskedCorrection,
    NoCorrection,
    RejectedCorrection,
    SapoLoss,
    TruncatedCorrection,
)
from schemas.metrics import Mean, Metrics

# Every test of all losses or all corrections takes them from here. The ranges are so narrow that some tokens are beyond
# each bound, and the numbers are none that float32 holds exactly, so that a constant of lower precision shows.
LOSSES: dict[str, LossConfig] = {
    "clipped": ClippedLoss(clip_low=0.2, clip_high=0.28, dual_clip=1.3),
    "gspo": GspoLoss(clip_low=0.05, clip_high=0.02),
    "cispo": CispoLoss(clip_low=0.3, clip_high=0.2),
    "sapo": SapoLoss(tau_positive=1.3, tau_negative=2.7),
    "gmpo": GmpoLoss(clip_low=0.1, clip_high=0.13),
    "dppo": DppoLoss(clip_low=0.001, clip_high=0.0013),
    "dppo-kl": DppoLoss(divergence="kl", clip_low=0.00027, clip_high=0.0003),
    "clip_cov": ClipCovLoss(clip_low=0.2, clip_high=0.28, share=0.3, cov_low=0.001, cov_high=0.7),
    "kl_cov": KlCovLoss(kl_coef=0.7, share=0.3),
    "cross_entropy": CrossEntropyLoss(),
}
CORRECTIONS: dict[str, CorrectionConfig] = {
    "none": NoCorrection(),
    "truncated": TruncatedCorrection(cap=1.1),
    "masked": MaskedCorrection(level="sequence", low=0.6, high=1.7),
    "rejected": RejectedCorrection(low=0.93, high=1.07, cap=1.3),
    "rejected tokens": RejectedCorrection(level="token", low=0.7, high=1.4),
    "rejected sequences": RejectedCorrection(level="sequence", low=0.6, high=1.7),
}
AGGREGATIONS = get_args(Aggregation)
NO_KL, NO_CORRECTION = KlConfig(), NoCorrection()

every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
_OF_SAMPLES = {name: loss for name, loss in LOSSES.items() if loss.kind != "cross_entropy"}
every_loss_of_samples = pytest.mark.parametrize("loss", _OF_SAMPLES.values(), ids=_OF_SAMPLES)
every_correction = pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)


@dataclass(frozen=True, eq=False)
class Row:
    """One sample with all inputs of the loss."""

    prompt: Tensor
    response: Tensor
    mask: Tensor
    behavior: Tensor
    sampler: Tensor
    reference: Tensor
    advantage: Tensor
    selected: Tensor


# The plain formulas are those of the papers, of one row alone, without packing or shared code.


def clipped_term(row: Row, logprobs: Tensor, config: ClippedLoss) -> Tensor:
    ratio = torch.exp(logprobs - row.behavior[row.mask])
    surrogate = torch.minimum(
        ratio * row.advantage, torch.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * row.advantage
    )
    if config.dual_clip is not None and row.advantage < 0:
        surrogate = torch.maximum(surrogate, config.dual_clip * row.advantage)
    return -surrogate


def gspo_term(row: Row, logprobs: Tensor, config: GspoLoss) -> Tensor:
    probs = torch.exp(logprobs)
    ratio = torch.exp((logprobs - row.behavior[row.mask]).mean()).detach() * probs / probs.detach()
    clipped = torch.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    return -torch.minimum(ratio * row.advantage, clipped * row.advantage)


def cispo_term(row: Row, logprobs: Tensor, config: CispoLoss) -> Tensor:
    ratio = torch.exp(logprobs - row.behavior[row.mask]).detach()
    return -torch.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * row.advantage * logprobs


def sapo_term(row: Row, logprobs: Tensor, config: SapoLoss) -> Tensor:
    ratio = torch.exp(logprobs - row.behavior[row.mask])
    tau = config.tau_positive if row.advantage > 0 else config.tau_negative
    return -row.advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))


def cross_entropy_term(row: Row, logprobs: Tensor, config: CrossEntropyLoss) -> Tensor:
    return -logprobs


def gmpo_term(row: Row, logprobs: Tensor, config: GmpoLoss) -> Tensor:
    sign = torch.sign(row.advantage)
    logs = logprobs - row.behavior[row.mask]
    bounded = sign * torch.minimum(sign * logs, sign * torch.clip(logs, -config.clip_low, config.clip_high))
    products = torch.exp(bounded)
    return -row.advantage * products.detach().prod() ** (1 / len(products)) * products / products.detach()


def dppo_term(row: Row, logprobs: Tensor, config: DppoLoss) -> Tensor:
    p, q = torch.exp(logprobs.detach()), torch.exp(row.sampler[row.mask])
    kl = q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))
    divergence = kl if config.divergence == "kl" else torch.abs(p - q)
    away, bound = (p > q, config.clip_high) if row.advantage > 0 else (p < q, config.clip_low)
    is_kept = ~(away & (divergence > bound))
    return -row.advantage * torch.exp(logprobs - row.behavior[row.mask]) * is_kept


def clip_cov_term(row: Row, logprobs: Tensor, config: ClipCovLoss) -> Tensor:
    clipped = clipped_term(row, logprobs, ClippedLoss(clip_low=config.clip_low, clip_high=config.clip_high))
    return clipped * ~row.selected[row.mask]


def kl_cov_term(row: Row, logprobs: Tensor, config: KlCovLoss) -> Tensor:
    logs = logprobs - row.behavior[row.mask]
    return -row.advantage * torch.exp(logs) + config.kl_coef * torch.abs(logs) * row.selected[row.mask]


# (row, policy log-probs of its trained tokens, config) -> the policy term of each of these tokens.
POLICY_TERMS: dict[str, Callable[..., Tensor]] = {
    "clipped": clipped_term,
    "gspo": gspo_term,
    "cispo": cispo_term,
    "sapo": sapo_term,
    "gmpo": gmpo_term,
    "dppo": dppo_term,
    "clip_cov": clip_cov_term,
    "kl_cov": kl_cov_term,
    "cross_entropy": cross_entropy_term,
}


def truncated_weights(importance: Tensor, config: TruncatedCorrection) -> Tensor:
    return torch.clip(importance, max=config.cap)


def masked_weights(importance: Tensor, config: MaskedCorrection) -> Tensor:
    product = importance.prod()
    return (product if config.low <= product <= config.high else 0.0) * torch.ones_like(importance)


def rejected_weights(importance: Tensor, config: RejectedCorrection) -> Tensor:
    product = importance.prod()
    held = {"token": importance, "sequence": product, "geometric": product ** (1 / len(importance))}[config.level]
    weights = torch.ones_like(importance) if config.cap is None else torch.clip(importance, max=config.cap)
    return weights * ((config.low <= held) & (held <= config.high))


# Of the importance weights of a row's trained tokens, by the levels that the corrections under test have.
WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "none": lambda importance, _: torch.ones_like(importance),
    "truncated": truncated_weights,
    "masked": masked_weights,
    "rejected": rejected_weights,
}


def row_inputs(
    ratios: Sequence[float],
    advantages: Sequence[float],
    lengths: Sequence[int],
    mask: Sequence[bool] | None = None,
    *,
    importance: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    entropy: Sequence[float] | None = None,
    selected: Sequence[bool] | None = None,
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
        selected=torch.tensor(selected if selected is not None else [False] * len(ratios), dtype=torch.bool),
    )


def floats(numbers: Sequence[float] | NDArray[np.float64]) -> Tensor:
    return torch.as_tensor(numbers, dtype=torch.float64)


def loss_of(
    inputs: LossInputs,
    num_tokens: int,
    num_sequences: int,
    loss: LossConfig | None = None,
    kl: KlConfig = NO_KL,
    correction: CorrectionConfig = NO_CORRECTION,
    distillation: DistillationConfig | None = None,
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
        distillation=distillation,
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
