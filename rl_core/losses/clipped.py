"""PPO's clipped surrogate, used by GRPO, Dr. GRPO and DAPO."""

import torch

from rl_core.losses.base import LossInputs, Surrogate, clipped_surrogate, log_ratio
from schemas.config.loss import ClippedLoss


def clipped_loss(config: ClippedLoss, trained: LossInputs) -> Surrogate:
    """Compute max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) per token, with r = exp(policy - behavior).

    With `dual_clip` c, the loss of a negative A is at most -A c (Ye et al. 2020, arXiv:1912.09729, equation 5);
    otherwise its gradient would grow with r without bound.

    Args:
        config: Clip range and dual clip.
        trained: The trained tokens.

    Returns:
        The surrogate; with dual clip, `clipped` has a third entry, `dual`.
    """
    advantages = trained.advantages
    surrogate = clipped_surrogate(log_ratio(trained).exp(), advantages, config.clip_low, config.clip_high)
    if config.dual_clip is None:
        return surrogate
    bound = -advantages * config.dual_clip
    is_dual = (advantages < 0) & (surrogate.losses > bound)
    losses = torch.where(is_dual, bound, surrogate.losses)
    return Surrogate(losses=losses, ratio=surrogate.ratio, clipped={**surrogate.clipped, "dual": is_dual})
