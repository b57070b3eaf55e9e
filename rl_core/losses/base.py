"""What every policy loss takes, and how per-token losses become one scalar.

T response tokens of one micro-batch, S sequences. A loss returns the micro-batch's share of the update's
loss: a sum divided by the update's own denominators. The shares of all micro-batches on all ranks therefore
add up to the update's loss, and their gradients to its gradient, whatever the split.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from schemas.metrics import Metrics

Aggregation = Literal["token_mean", "sequence_mean"]
PolicyLoss = Callable[..., tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class LossInputs:
    """The flat tokens of one micro-batch, sequence after sequence; log-probs in nats."""

    policy_logprobs: Tensor  # [T] float32, with gradient
    behavior_logprobs: Tensor  # [T] float32
    advantages: Tensor  # [T] float32
    loss_mask: Tensor  # [T] bool, what is trained
    sequence_index: Tensor  # [T] int64, which sequence a token belongs to
    loss_tokens_per_sequence: Tensor  # [S] int64, true values of loss_mask
    reference_logprobs: Tensor | None = None  # [T] float32

    @classmethod
    def from_rows(
        cls,
        *,
        policy_logprobs: Tensor,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        response_lengths: Tensor,
        reference_logprobs: Tensor | None = None,
    ) -> "LossInputs":
        """Spread per-sequence advantages over the tokens of S sequences.

        Args:
            policy_logprobs: [T] float32, with gradient.
            behavior_logprobs: [T] float32.
            advantages: [S] float32.
            loss_mask: [T] bool.
            response_lengths: [S] integer, tokens; they add up to T.
            reference_logprobs: [T] float32, or None.

        Raises:
            ValueError: A token column doesn't hold as many values as the lengths say.
        """
        lengths = response_lengths.to(device=policy_logprobs.device, dtype=torch.int64)
        columns = {
            "policy_logprobs": policy_logprobs,
            "behavior_logprobs": behavior_logprobs,
            "loss_mask": loss_mask,
            "reference_logprobs": reference_logprobs,
        }
        num_tokens = int(lengths.sum())
        for name, column in columns.items():
            if column is not None and column.shape != (num_tokens,):
                raise ValueError(f"{name} has shape {tuple(column.shape)}, but response_lengths add up to {num_tokens}")
        if advantages.shape != lengths.shape:
            raise ValueError(f"advantages has shape {tuple(advantages.shape)}, but there are {len(lengths)} sequences")
        sequence_index = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        return cls(
            policy_logprobs=policy_logprobs,
            behavior_logprobs=behavior_logprobs,
            advantages=advantages[sequence_index],
            loss_mask=loss_mask,
            sequence_index=sequence_index,
            loss_tokens_per_sequence=torch.bincount(sequence_index[loss_mask], minlength=len(lengths)),
            reference_logprobs=reference_logprobs,
        )

    def trained(self) -> "LossInputs":
        """Only the tokens that are trained.

        Selecting, rather than multiplying by the mask, keeps a non-finite value of an untrained token out of
        the gradient.
        """
        mask, reference = self.loss_mask, self.reference_logprobs
        return LossInputs(
            policy_logprobs=self.policy_logprobs[mask],
            behavior_logprobs=self.behavior_logprobs[mask],
            advantages=self.advantages[mask],
            loss_mask=mask[mask],
            sequence_index=self.sequence_index[mask],
            loss_tokens_per_sequence=self.loss_tokens_per_sequence,
            reference_logprobs=None if reference is None else reference[mask],
        )


def aggregate(token_losses: Tensor, trained: LossInputs, aggregation: Aggregation) -> Tensor:
    """The unnormalised sum of per-token losses; `denominator` is what it is divided by.

    Args:
        token_losses: [T] losses of the trained tokens.
        trained: The inputs, reduced to the trained tokens.
        aggregation: `token_mean` weighs every token alike; `sequence_mean` weighs every sequence alike.

    Returns:
        A scalar: the sum over the tokens, or the sum over the sequences of their token means.
    """
    if aggregation == "sequence_mean":
        token_losses = token_losses / trained.loss_tokens_per_sequence[trained.sequence_index]
    return token_losses.sum()


def denominator(aggregation: Aggregation, *, num_loss_tokens: int, num_live_sequences: int) -> int:
    """What the update's loss sum is divided by: its loss tokens or its live sequences, over all ranks."""
    return num_loss_tokens if aggregation == "token_mean" else num_live_sequences
