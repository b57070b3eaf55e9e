"""PPO's clipped surrogate, as GRPO, Dr. GRPO and DAPO use it."""

import torch

from rl_core.losses.base import LossInputs, Surrogate, clipped_surrogate, log_ratio
from schemas.config.loss import ClippedLoss


def clipped_loss(trained: LossInputs, config: ClippedLoss) -> Surrogate:
    """Per token, max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(policy - behavior).

    With `dual_clip` c, that of a negative A is at most -A c (Ye et al. 2020, arXiv:1912.09729, equation 5): an
    r far above 1 would otherwise push as hard as it is large.

    Args:
        trained: The trained tokens.
        config: Clip range and dual clip.

    Returns:
        The surrogate; with dual clip, `clipped` has a third side `dual`.
    """
    advantages = trained.advantages
    surrogate = clipped_surrogate(log_ratio(trained).exp(), advantages, config.clip_low, config.clip_high)
    if config.dual_clip is None:
        return surrogate
    bound = -advantages * config.dual_clip
    is_dual = (advantages < 0) & (surrogate.losses > bound)
    losses = torch.where(is_dual, bound, surrogate.losses)
    return Surrogate(losses=losses, ratio=surrogate.ratio, clipped={**surrogate.clipped, "dual": is_dual})
