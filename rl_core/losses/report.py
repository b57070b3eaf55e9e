"""The metrics of a loss: sums over trained tokens, which merge to the same values for any split. T trained tokens."""

import torch
from torch import Tensor

from rl_core.losses.base import LossInputs, Surrogate
from schemas.metrics import EffectiveFraction, Max, Mean, Metrics


@torch.no_grad()
def report(
    trained: LossInputs, surrogate: Surrogate, token_metrics: dict[str, Tensor], loss_sum: Tensor, loss_weight: float
) -> Metrics:
    """Compute the metrics of one micro-batch, with a single copy from the device.

    Args:
        trained: The trained tokens.
        surrogate: Their policy term.
        token_metrics: [T] additional values by name.
        loss_sum: The unnormalized loss, a scalar.
        loss_weight: The denominator of the loss if this micro-batch were the whole update.

    Returns:
        `loss`; means over the trained tokens of `ratio`, if the loss has one, `clip_fraction` and its sides that the
        loss has (`/low`, `/high`, `/dual`, `/cov`), the absolute difference of behavior and sampler log-prob
        (`mismatch/mean`), and `token_metrics`; the effective sample size of the importance weights, if `token_metrics`
        has them (`mismatch/ess`); and, if there is a trained token, `ratio_max` and `mismatch/max`.
    """
    largest = {} if surrogate.ratio is None else {"ratio_max": surrogate.ratio}
    ratio = {} if surrogate.ratio is None else {"ratio": surrogate.ratio}
    values = {**ratio, **_clip_fractions(surrogate), **token_metrics}
    if trained.sampler_logprobs is not None:
        distance = (trained.behavior_logprobs - trained.sampler_logprobs).abs()
        values["mismatch/mean"] = largest["mismatch/max"] = distance
    num_tokens = len(surrogate.losses)
    weights = token_metrics.get("mismatch/weight", loss_sum.new_empty(0))
    sums = [loss_sum.double(), weights.double().square().sum()]
    sums += [column.sum(dtype=torch.float64) for column in values.values()]
    maxima = [column.max().double() for column in largest.values()] if num_tokens else []
    loss, squares, *numbers = torch.stack(sums + maxima).tolist()
    metrics: Metrics = {"loss": Mean(total=loss, weight=loss_weight)}
    metrics |= {name: Mean(total=total, weight=num_tokens) for name, total in zip(values, numbers, strict=False)}
    if "mismatch/weight" in token_metrics:
        total = numbers[list(values).index("mismatch/weight")]
        metrics["mismatch/ess"] = EffectiveFraction(total=total, squares=squares, count=num_tokens)
    if num_tokens:
        tops = zip(largest, numbers[len(values) :], strict=True)
        metrics |= {name: Max(value=value) for name, value in tops}
    return metrics


@torch.no_grad()
def nan_unless_finite(trained: LossInputs) -> Tensor:
    """Return a scalar 0, or NaN if any trained token has a log-prob or an advantage that isn't finite.

    Otherwise clamping, truncation or masking could hide an infinite value, and a column that is only reported would not
    reach the loss at all.
    """
    zeros = [(column * 0).sum() for column in trained.finite_columns().values()]
    return torch.stack(zeros).sum()


def _clip_fractions(surrogate: Surrogate) -> dict[str, Tensor]:
    """Mark the tokens that the clip range clips, if there is one, and those of each side; the dual clip is separate."""
    sides = {f"clip_fraction/{side}": tokens for side, tokens in surrogate.clipped.items()}
    of_range = [surrogate.clipped[side] for side in ("low", "high") if side in surrogate.clipped]
    return {"clip_fraction": torch.stack(of_range).any(0), **sides} if of_range else sides
