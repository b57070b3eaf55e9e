"""CISPO: clipped importance weights, so that every token keeps its gradient."""

from rl_core.losses.base import LossInputs, Surrogate, log_ratio
from schemas.config.loss import CispoLoss


def cispo_loss(config: CispoLoss, trained: LossInputs) -> Surrogate:
    """Compute -A w logp per token, where w = clip(r, 1 - clip_low, 1 + clip_high) has no gradient.

    MiniMax 2025, arXiv:2506.13585, equation 4, with r = exp(policy - behavior).

    Args:
        config: Clip range of the weights.
        trained: The trained tokens.

    Returns:
        The surrogate; `clipped` marks the tokens with clipped weights, for either sign of A.
    """
    ratio = log_ratio(trained).exp().detach()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    losses = -trained.advantages * ratio.clamp(low, high) * trained.policy_logprobs
    return Surrogate(losses=losses, ratio=ratio, clipped={"low": ratio < low, "high": ratio > high})
