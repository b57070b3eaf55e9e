"""How per-token losses become one scalar.

A loss is the micro-batch's share of the update's loss: a sum divided by the update's own denominators. The shares
of all micro-batches on all ranks therefore add up to the update's loss, and their gradients to its gradient,
whatever the split. A sequence without a trained token counts in no denominator.
"""

from torch import Tensor

from rl_core.losses.base import LossInputs
from schemas.config.loss import Aggregation


def aggregate(token_losses: Tensor, trained: LossInputs, aggregation: Aggregation) -> Tensor:
    """The unnormalised sum of per-token losses; `denominator` is what it is divided by.

    Args:
        token_losses: [T] losses of the trained tokens.
        trained: The inputs, reduced to the trained tokens.
        aggregation: `seq_mean_token_mean` weighs every sequence alike, the others every token.

    Returns:
        A scalar: the sum over the tokens, or the sum over the sequences of their token means.
    """
    if aggregation == "seq_mean_token_mean":
        token_losses = token_losses / trained.loss_tokens_per_sequence[trained.sequence_index]
    return token_losses.sum()


def denominator(aggregation: Aggregation, norm_tokens: float, num_loss_tokens: int, num_live_sequences: int) -> float:
    """What a loss sum over so many trained tokens and sequences is divided by.

    Args:
        aggregation: `token_mean` divides by the tokens, the others by the sequences; `seq_mean_token_sum_norm`
            also by a constant, in place of each sequence's length (Dr. GRPO, arXiv:2503.20783).
        norm_tokens: That constant, tokens.
        num_loss_tokens: Trained tokens.
        num_live_sequences: Sequences with at least one of them.
    """
    if aggregation == "token_mean":
        return num_loss_tokens
    return num_live_sequences * norm_tokens if aggregation == "seq_mean_token_sum_norm" else num_live_sequences
