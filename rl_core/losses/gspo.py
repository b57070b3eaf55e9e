"""GSPO: the clipped surrogate of sequence-level ratios."""

from rl_core.losses.base import MAX_LOG_RATIO, LossInputs, Surrogate, clipped_surrogate
from schemas.config.loss import GspoLoss


def gspo_loss(config: GspoLoss, trained: LossInputs) -> Surrogate:
    """Compute max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)) per sequence, for each of its trained tokens.

    s is the exp of the mean of policy - behavior over the sequence's trained tokens (Zheng et al. 2025,
    arXiv:2507.18071, equations 5 and 7). Each token's ratio has the value s and the gradient of its own log-prob
    (GSPO-token, equation 14), so that the mean over a sequence's tokens has the gradient of GSPO.

    Args:
        config: Clip range of s.
        trained: The trained tokens; a sequence is never split between micro-batches.

    Returns:
        The surrogate; its `ratio` is s.
    """
    difference = trained.policy_logprobs - trained.behavior_logprobs
    counts = trained.loss_tokens_per_sequence.clamp(min=1)
    mean = (trained.sum_by_sequence(difference.detach()) / counts).clamp(max=MAX_LOG_RATIO)
    own = difference - difference.detach()  # value 0, gradient of the log-prob
    ratio = (mean[trained.sequence_index] + own).exp()
    return clipped_surrogate(ratio, trained.advantages, config.clip_low, config.clip_high)
