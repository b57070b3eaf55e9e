"""The policy losses: a surrogate per token, and which tokens it clips."""

import torch
from torch import Tensor

from rl_core.losses.base import MAX_LOG_RATIO, LossInputs, Surrogate, clipped_surrogate, log_ratio
from rl_core.registry import Registry, entry
from schemas.config.loss import (
    CispoLoss,
    ClipCovLoss,
    ClippedLoss,
    CrossEntropyLoss,
    DppoLoss,
    GmpoLoss,
    GspoLoss,
    KlCovLoss,
    LossConfig,
    SapoLoss,
)


def clipped_loss(config: ClippedLoss, trained: LossInputs) -> Surrogate:
    """Compute max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) per token, with r = exp(policy - behavior).

    With `dual_clip` c, the loss of a negative A is at most -A c (Ye et al. 2020, arXiv:1912.09729, equation 5);
    otherwise its gradient would grow with r without bound. With it, `clipped` has a third entry, `dual`.
    """
    advantages = trained.advantages
    surrogate = clipped_surrogate(log_ratio(trained).exp(), advantages, config.clip_low, config.clip_high)
    if config.dual_clip is None:
        return surrogate
    bound = -advantages * config.dual_clip
    is_dual = (advantages < 0) & (surrogate.losses > bound)
    losses = torch.where(is_dual, bound, surrogate.losses)
    return Surrogate(losses=losses, ratio=surrogate.ratio, clipped={**surrogate.clipped, "dual": is_dual})


def cispo_loss(config: CispoLoss, trained: LossInputs) -> Surrogate:
    """Compute -A w logp per token, where w = clip(r, 1 - clip_low, 1 + clip_high) has no gradient.

    MiniMax 2025, arXiv:2506.13585, equation 4, with r = exp(policy - behavior). `clipped` marks the tokens with
    clipped weights, for either sign of A.
    """
    ratio = log_ratio(trained).exp().detach()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    losses = -trained.advantages * ratio.clamp(low, high) * trained.policy_logprobs
    return Surrogate(losses=losses, ratio=ratio, clipped={"low": ratio < low, "high": ratio > high})


def gspo_loss(config: GspoLoss, trained: LossInputs) -> Surrogate:
    """Compute max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)) per sequence, for each of its trained tokens.

    s is the exp of the mean of policy - behavior over the sequence's trained tokens (Zheng et al. 2025,
    arXiv:2507.18071, equations 5 and 7). Each token's ratio has the value s and the gradient of its own log-prob
    (GSPO-token, equation 14), so that the mean over a sequence's tokens has the gradient of GSPO. A sequence is
    never split between micro-batches.
    """
    ratio = _geometric_mean(trained, trained.policy_logprobs - trained.behavior_logprobs)
    return clipped_surrogate(ratio, trained.advantages, config.clip_low, config.clip_high)


def gmpo_loss(config: GmpoLoss, trained: LossInputs) -> Surrogate:
    """Compute -A s per sequence, for each of its trained tokens, with s the geometric mean of their clipped ratios.

    Zhao et al. 2025, arXiv:2507.20673, equation 4: log r of a token is at most `clip_high` if A > 0, and at least
    -`clip_low` if A < 0. A clipped token counts in s, without a gradient. As in GSPO-token, each token has the value s
    and the gradient of its own log-prob, so that the mean over a sequence's tokens has the gradient of GMPO. The
    clip range is of log r, in nats.
    """
    advantages, difference = trained.advantages, log_ratio(trained)
    bounded = torch.where(
        advantages > 0, difference.clamp(max=config.clip_high), difference.clamp(min=-config.clip_low)
    )
    ratio = _geometric_mean(trained, bounded)
    clipped = {
        "low": (advantages < 0) & (difference < -config.clip_low),
        "high": (advantages > 0) & (difference > config.clip_high),
    }
    return Surrogate(losses=-advantages * ratio, ratio=ratio, clipped=clipped)


def dppo_loss(config: DppoLoss, trained: LossInputs) -> Surrogate:
    """Compute -A r per token, and 0 where the token's probability has already moved too far in the direction of A.

    Qi et al. 2026, arXiv:2602.04879, section 4, with the binary divergences of the policy's probability p from the
    sampler's q: |p - q|, or q log(q / p) + (1 - q) log((1 - q) / (1 - p)). The trust region is around the sampler, as
    in the paper, so that it also holds in the only update of a step. r is policy over behavior probability, as in the
    other losses; what is left of p / q is the correction's weight. `clipped` marks the masked tokens.

    Raises:
        ValueError: The inputs lack sampler log-probs.
    """
    if trained.sampler_logprobs is None:
        raise ValueError('loss.kind is "dppo", but the inputs lack sampler_logprobs; add them or choose another loss')
    advantages, ratio = trained.advantages, log_ratio(trained).exp()
    policy, sampler = trained.policy_logprobs.detach(), trained.sampler_logprobs
    moved = policy.exp() - sampler.exp()
    divergence = moved.abs() if config.divergence == "tv" else _binary_kl(sampler, policy)
    clipped = {
        "low": (advantages < 0) & (moved < 0) & (divergence > config.clip_low),
        "high": (advantages > 0) & (moved > 0) & (divergence > config.clip_high),
    }
    losses = torch.where(clipped["low"] | clipped["high"], 0.0, -advantages * ratio)
    return Surrogate(losses=losses, ratio=ratio, clipped=clipped)


def sapo_loss(config: SapoLoss, trained: LossInputs) -> Surrogate:
    """Compute -A (4 / tau) sigmoid(tau (r - 1)) per token, with r = exp(policy - behavior).

    Gao et al. 2025, arXiv:2511.20347: tau is `tau_positive` for positive A, else `tau_negative`. At r = 1 the gradient
    is that of -A r, and it fades as r departs from 1.
    """
    advantages, ratio = trained.advantages, log_ratio(trained).exp()
    negative = torch.full_like(ratio, config.tau_negative)
    tau = torch.where(advantages > 0, config.tau_positive, negative)
    return Surrogate(losses=-advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), ratio=ratio, clipped={})


def clip_cov_loss(config: ClipCovLoss, trained: LossInputs) -> Surrogate:
    """Compute PPO's clipped surrogate per token, and 0 for selected ones: Clip-Cov.

    Cui et al. 2025, arXiv:2505.22617, section 4; `rl_core.training.rows.with_selected` selects.

    Args:
        config: Clip range.
        trained: The trained tokens, with those that are selected.

    Returns:
        The surrogate; `clipped` marks the selected tokens as `cov`, and those that the range clips, of all.

    Raises:
        ValueError: The inputs don't say which tokens are selected.
    """
    selected = _selected(trained, config.kind)
    surrogate = clipped_surrogate(log_ratio(trained).exp(), trained.advantages, config.clip_low, config.clip_high)
    losses = torch.where(selected, 0.0, surrogate.losses)
    return Surrogate(losses=losses, ratio=surrogate.ratio, clipped={**surrogate.clipped, "cov": selected})


def kl_cov_loss(config: KlCovLoss, trained: LossInputs) -> Surrogate:
    """Compute -A r per token, plus kl_coef |policy - behavior log-prob| for selected ones: KL-Cov.

    Cui et al. 2025, arXiv:2505.22617, section 4; `rl_core.training.rows.with_selected` selects.

    Args:
        config: The penalty's coefficient.
        trained: The trained tokens, with those that are selected.

    Returns:
        The surrogate; `clipped` marks the selected tokens as `cov`.

    Raises:
        ValueError: The inputs don't say which tokens are selected.
    """
    selected, ratio = _selected(trained, config.kind), log_ratio(trained).exp()
    distance = (trained.policy_logprobs - trained.behavior_logprobs).abs()
    losses = -trained.advantages * ratio + torch.where(selected, config.kl_coef * distance, 0.0)
    return Surrogate(losses=losses, ratio=ratio, clipped={"cov": selected})


def cross_entropy_loss(_: CrossEntropyLoss, trained: LossInputs) -> Surrogate:
    """Compute -logp per token: advantages and behavior log-probs play no part, and there is no ratio."""
    losses = -trained.policy_logprobs
    return Surrogate(losses=losses, ratio=None, clipped={}, metrics={"cross_entropy": losses})


SURROGATES: Registry[[LossInputs], Surrogate] = Registry(
    "rl_core.losses.surrogates.SURROGATES",
    LossConfig,
    entry(ClippedLoss, clipped_loss),
    entry(GspoLoss, gspo_loss),
    entry(CispoLoss, cispo_loss),
    entry(SapoLoss, sapo_loss),
    entry(GmpoLoss, gmpo_loss),
    entry(DppoLoss, dppo_loss),
    entry(ClipCovLoss, clip_cov_loss),
    entry(KlCovLoss, kl_cov_loss),
    entry(CrossEntropyLoss, cross_entropy_loss),
)
"""Policy terms: (config, inputs of the T trained tokens) -> surrogate of T tokens."""


def _geometric_mean(trained: LossInputs, log_ratios: Tensor) -> Tensor:
    """Return the geometric mean of the ratios of each sequence, [T], with the gradient of the token's own log-ratio."""
    counts = trained.loss_tokens_per_sequence.clamp(min=1)
    mean = (trained.sum_by_sequence(log_ratios.detach()) / counts).clamp(max=MAX_LOG_RATIO)
    own = log_ratios - log_ratios.detach()  # value 0
    return (mean[trained.sequence_index] + own).exp()


def _selected(trained: LossInputs, kind: str) -> Tensor:
    if trained.selected is None:
        raise ValueError(f'loss.kind is "{kind}", but the inputs lack selected; add it or choose another loss')
    return trained.selected


def _binary_kl(logprobs: Tensor, others: Tensor) -> Tensor:
    """Return the KL divergence, nats, of a token or none with these log-probs from one with the others, [T]."""
    rest, other_rest = ((-torch.expm1(column)).clamp(min=0) for column in (logprobs, others))
    return logprobs.exp() * (logprobs - others) + torch.xlogy(rest, rest) - torch.xlogy(rest, other_rest)
