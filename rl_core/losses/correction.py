"""Importance weights for an engine whose log-probs differ from the trainer's. T trained tokens.

w = exp(behavior - sampler log-prob): the tokens were sampled by the engine, but the loss is an expectation over samples
from the trainer with the same weights.
"""

from typing import Literal

import torch
from torch import Tensor

from rl_core.losses.base import MAX_LOG_RATIO, LossInputs
from rl_core.registry import Registry, entry
from schemas.config.loss import (
    CorrectionConfig,
    MaskedCorrection,
    NoCorrection,
    RejectedCorrection,
    TruncatedCorrection,
)

Correction = tuple[Tensor | None, dict[str, Tensor]]
"""[T] weights, or None for no correction, and [T] values of metrics by name."""


def correction_weights(trained: LossInputs, config: CorrectionConfig) -> Correction:
    """Compute the factor of each token's policy term.

    Args:
        trained: The trained tokens, with sampler log-probs unless the config's kind is `none`.
        config: The correction and its bounds.

    Returns:
        [T] weights without gradient, or None for no correction; and [T] per-token metrics by name: `mismatch/weight`
        (w of the token or the sequence, by the config's level), and with a correction `correction/weight` (the weight
        used) and, as far as they apply, `correction/truncated` and `correction/masked` (the affected tokens).

    Raises:
        ValueError: The correction needs sampler log-probs that the inputs lack.
    """
    if trained.sampler_logprobs is None:
        if config.kind == "none":
            return None, {}
        raise ValueError(
            f'correction.kind is "{config.kind}", but the inputs lack sampler_logprobs; add them or set it to "none"'
        )
    return CORRECTIONS(config, trained)


def _none(_: NoCorrection, trained: LossInputs) -> Correction:
    return None, {"mismatch/weight": _importance(trained, "token")}


def _truncated(config: TruncatedCorrection, trained: LossInputs) -> Correction:
    importance = _importance(trained, config.level)
    weights = importance.clamp(max=config.cap)
    return weights, {
        "mismatch/weight": importance,
        "correction/weight": weights,
        "correction/truncated": importance > config.cap,
    }


def _masked(config: MaskedCorrection, trained: LossInputs) -> Correction:
    importance = _importance(trained, config.level)
    outside = _outside(importance, config.low, config.high)
    weights = torch.where(outside, 0.0, importance)
    return weights, {"mismatch/weight": importance, "correction/weight": weights, "correction/masked": outside}


def _rejected(config: RejectedCorrection, trained: LossInputs) -> Correction:
    importance = _importance(trained, config.level)
    outside = _outside(importance, config.low, config.high)
    if config.cap is None:
        accepted, metrics = torch.ones_like(importance), {}
    else:
        own = _importance(trained, "token")
        accepted, metrics = own.clamp(max=config.cap), {"correction/truncated": ~outside & (own > config.cap)}
    weights = torch.where(outside, 0.0, accepted)
    metrics |= {"mismatch/weight": importance, "correction/weight": weights, "correction/masked": outside}
    return weights, metrics


CORRECTIONS: Registry[[LossInputs], Correction] = Registry(
    "rl_core.losses.correction.CORRECTIONS",
    CorrectionConfig,
    entry(NoCorrection, _none),
    entry(TruncatedCorrection, _truncated),
    entry(MaskedCorrection, _masked),
    entry(RejectedCorrection, _rejected),
)
"""Corrections: (config, inputs of the T trained tokens with sampler log-probs) -> weights and metrics."""


def _outside(importance: Tensor, low: float, high: float) -> Tensor:
    """Mark weights beyond the bounds, [T]; NaN, which is neither inside nor outside, isn't masked."""
    return (importance < low) | (importance > high)


@torch.no_grad()
def _importance(trained: LossInputs, level: Literal["token", "sequence", "geometric"]) -> Tensor:
    """Return w of each token, or the product or geometric mean over its sequence's trained tokens, [T].

    It is clamped below overflow; NaN stays NaN.
    """
    assert trained.sampler_logprobs is not None
    log_weights = trained.behavior_logprobs - trained.sampler_logprobs
    if level != "token":
        log_weights = trained.sum_by_sequence(log_weights)[trained.sequence_index]
    if level == "geometric":
        log_weights = log_weights / trained.loss_tokens_per_sequence[trained.sequence_index]
    return log_weights.clamp(max=MAX_LOG_RATIO).exp()
