"""Aggregation of per-token losses to a scalar.

A micro-batch's loss is its part of the update's loss: a sum divided by the denominators of the whole update. The losses
of all micro-batches on all ranks therefore add up to the update's loss, and their gradients to its gradient, with any
split. A sequence without a trained token counts in no denominator.
"""

from torch import Tensor

from rl_core.losses.base import LossInputs
from schemas.config.loss import Aggregation


def aggregate(token_losses: Tensor, trained: LossInputs, aggregation: Aggregation) -> Tensor:
    """Sum per-token losses, unnormalized; the caller divides by `denominator`.

    Args:
        token_losses: [T] losses of the trained tokens.
        trained: The inputs, reduced to the trained tokens.
        aggregation: `seq_mean_token_mean` gives every sequence the same weight, the others every token.

    Returns:
        A scalar: the sum over the tokens, or the sum over the sequences of their token means.
    """
    if aggregation == "seq_mean_token_mean":
        token_losses = token_losses / trained.loss_tokens_per_sequence[trained.sequence_index]
    return token_losses.sum()


def denominator(aggregation: Aggregation, norm_tokens: float, num_loss_tokens: int, num_live_sequences: int) -> float:
    """Return the denominator of a loss sum.

    Args:
        aggregation: `token_mean` divides by the tokens, the others by the sequences; `seq_mean_token_sum_norm` also
            by a constant instead of each sequence's length (Dr. GRPO, arXiv:2503.20783).
        norm_tokens: That constant, in tokens.
        num_loss_tokens: Trained tokens in the sum.
        num_live_sequences: Sequences in the sum with at least one trained token.
    """
    if aggregation == "token_mean":
        return num_loss_tokens
    return num_live_sequences * norm_tokens if aggregation == "seq_mean_token_sum_norm" else num_live_sequences
