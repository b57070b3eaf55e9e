"""PPO's clipped surrogate with an optional KL term to a reference."""

import torch
from torch import Tensor

from rl_core.losses.base import LossInputs, aggregate, denominator
from schemas.config.loss import ClippedLoss
from schemas.metrics import Max, Mean, Metrics

# Nats. The exp of much more overflows, and then the clipped branch's zero gradient turns into NaN.
MAX_LOG_RATIO = 20.0


def clipped_loss(
    inputs: LossInputs, config: ClippedLoss, *, num_loss_tokens: int, num_live_sequences: int
) -> tuple[Tensor, Metrics]:
    """The micro-batch's share of the update's clipped loss.

    Per token, with r = exp(policy - behavior) and A the advantage, max(-A r, -A clip(r, 1 - clip_low,
    1 + clip_high)) (Schulman et al. 2017, arXiv:1707.06347, eq. 7), plus kl_coef times k3 = e^x - x - 1 with
    x = reference - policy.

    Args:
        inputs: The micro-batch's tokens; none trained is legal and gives a zero with a graph.
        config: Clip range, aggregation and KL coefficient.
        num_loss_tokens: Loss tokens of the whole update, over all ranks.
        num_live_sequences: Sequences with a loss token of the whole update, over all ranks.

    Returns:
        A scalar with gradient, and metrics that merge exactly: `loss`, weighted as the loss is, and per token
        `ratio`, `ratio_max` (absent when nothing is trained), `clip_fraction`, `approx_kl` (k3 of policy and
        behavior) and, where there is a reference, `kl`.

    Raises:
        ValueError: `kl_coef` is positive but the inputs hold no reference log-probs.
    """
    if config.kl_coef > 0 and inputs.reference_logprobs is None:
        raise ValueError(
            f"loss.kl_coef is {config.kl_coef}, but there are no reference_logprobs; set it to 0 or add them"
        )
    trained = inputs.trained()
    log_ratio = (trained.policy_logprobs - trained.behavior_logprobs).clamp(max=MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -trained.advantages * ratio
    clipped = -trained.advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    token_losses = torch.maximum(plain, clipped)
    kl = None
    if trained.reference_logprobs is not None:
        kl = k3(trained.reference_logprobs - trained.policy_logprobs)
        if config.kl_coef > 0:
            token_losses = token_losses + config.kl_coef * kl
    loss_sum = aggregate(token_losses, trained, config.aggregation)
    loss = loss_sum / denominator(
        config.aggregation, num_loss_tokens=num_loss_tokens, num_live_sequences=num_live_sequences
    )
    token_metrics = {"ratio": ratio, "clip_fraction": clipped > plain, "approx_kl": k3(log_ratio)}
    if kl is not None:
        token_metrics["kl"] = kl
    num_live = int((inputs.loss_tokens_per_sequence > 0).sum())
    weight = len(token_losses) if config.aggregation == "token_mean" else num_live
    return loss, {"loss": Mean(total=loss_sum.item(), weight=weight), **_reduce(token_metrics)}


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's low-variance, non-negative KL estimate: e^x - x - 1, elementwise, in nats."""
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


@torch.no_grad()
def _reduce(token_metrics: dict[str, Tensor]) -> Metrics:
    """Token-weighted means, and the largest ratio, with one copy from the device."""
    sums = [values.sum(dtype=torch.float64) for values in token_metrics.values()]
    ratio = token_metrics["ratio"]
    if num_tokens := len(ratio):
        sums.append(ratio.max().double())
    totals = torch.stack(sums).tolist()
    metrics: Metrics = {
        name: Mean(total=total, weight=num_tokens) for name, total in zip(token_metrics, totals, strict=False)
    }
    if num_tokens:
        metrics["ratio_max"] = Max(value=totals[-1])
    return metrics
