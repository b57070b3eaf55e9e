"""Importance weights for an engine whose log-probs differ from the trainer's. T trained tokens.

w = exp(behavior - sampler log-prob): the tokens were drawn by the sampler, but the loss is about what the trainer
would have drawn with the same weights.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rl_core.losses.base import MAX_LOG_RATIO, LossInputs
from schemas.config.correction import CorrectionConfig, MaskedCorrection, NoCorrection, TruncatedCorrection

# The weights that are used, and the share of tokens that is told apart, by its metric's name.
Weighted = tuple[Tensor | None, dict[str, Tensor]]


def correction_weights(trained: LossInputs, config: CorrectionConfig) -> Weighted:
    """What the policy term of each token is multiplied by.

    Args:
        trained: The trained tokens, with their sampler log-probs unless the config's kind is `none`.
        config: Which correction, with its bounds.

    Returns:
        [T] weights without gradient, or None for no correction; and [T] per-token metrics by name:
        `mismatch/weight` (w, of the token, or of the sequence where the config says so), and with a correction
        `correction/weight` (as used) and `correction/truncated` or `correction/masked` (which tokens).

    Raises:
        ValueError: A correction is asked for, but there are no sampler log-probs.
    """
    if trained.sampler_logprobs is None:
        if config.kind == "none":
            return None, {}
        raise ValueError(
            f'correction.kind is "{config.kind}", but there are no sampler_logprobs; set it to "none" or add them'
        )
    return _CORRECTIONS[config.kind](trained, config)


def _none(trained: LossInputs, config: NoCorrection) -> Weighted:
    return None, {"mismatch/weight": _importance(trained, "token")}


def _truncated(trained: LossInputs, config: TruncatedCorrection) -> Weighted:
    importance = _importance(trained, config.level)
    weights = importance.clamp(max=config.cap)
    return weights, {
        "mismatch/weight": importance,
        "correction/weight": weights,
        "correction/truncated": importance > config.cap,
    }


def _masked(trained: LossInputs, config: MaskedCorrection) -> Weighted:
    importance = _importance(trained, config.level)
    # What is outside is asked for, not what is inside: a NaN is neither, and must not be left out.
    outside = (importance < config.low) | (importance > config.high)
    weights = torch.where(outside, 0.0, importance)
    return weights, {"mismatch/weight": importance, "correction/weight": weights, "correction/masked": outside}


_CORRECTIONS: dict[str, Callable[..., Weighted]] = {"none": _none, "truncated": _truncated, "masked": _masked}


@torch.no_grad()
def _importance(trained: LossInputs, level: Literal["token", "sequence"]) -> Tensor:
    """[T] w of the token, or the product of its sequence's, held below overflow; NaN stays NaN."""
    assert trained.sampler_logprobs is not None
    log_weights = trained.behavior_logprobs - trained.sampler_logprobs
    if level == "sequence":
        log_weights = trained.sum_by_sequence(log_weights)[trained.sequence_index]
    return log_weights.clamp(max=MAX_LOG_RATIO).exp()
