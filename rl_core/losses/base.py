"""The inputs and outputs of policy losses, and their aggregation. T response tokens of one micro-batch, S sequences.

A micro-batch's loss is its part of the update's loss: a sum divided by the denominators of the whole update. The losses
of all micro-batches on all ranks therefore add up to the update's loss, and their gradients to its gradient, with any
split. A sequence without a trained token counts in no denominator.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from schemas.config.loss import Aggregation

# Nats. The exp of a much larger number overflows, and then the zero gradient of the clipped branch becomes NaN.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossInputs:
    """The flat tokens of one micro-batch, sequence after sequence; log-probs and entropies in nats."""

    policy_logprobs: Tensor  # [T] float32, with gradient
    behavior_logprobs: Tensor  # [T] float32
    advantages: Tensor  # [T] float32
    loss_mask: Tensor  # [T] bool, the trained tokens
    sequence_index: Tensor  # [T] int64, the sequence of each token
    loss_tokens_per_sequence: Tensor  # [S] int64, true values of loss_mask
    sampler_logprobs: Tensor | None = None  # [T] float32
    reference_logprobs: Tensor | None = None  # [T] float32
    teacher_logprobs: Tensor | None = None  # [T] float32
    policy_top_logprobs: Tensor | None = None  # [T, K] float32, with gradient, of the tokens of teacher_top_logprobs
    teacher_top_logprobs: Tensor | None = None  # [T, K] float32, of a teacher's most likely tokens
    entropy: Tensor | None = None  # [T] float32, with gradient for an entropy bonus
    selected: Tensor | None = None  # [T] bool, the tokens that the update's covariances select

    @classmethod
    def from_rows(
        cls,
        *,
        policy_logprobs: Tensor,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        response_lengths: Tensor,
        sampler_logprobs: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
        teacher_logprobs: Tensor | None = None,
        policy_top_logprobs: Tensor | None = None,
        teacher_top_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        selected: Tensor | None = None,
    ) -> "LossInputs":
        """Create inputs for S sequences.

        Args:
            policy_logprobs: [T] float32, with gradient.
            behavior_logprobs: [T] float32.
            advantages: [T] float32.
            loss_mask: [T] bool.
            response_lengths: [S] integer, tokens, with sum T.
            sampler_logprobs: [T] float32; None: the mismatch is neither reported nor corrected.
            reference_logprobs: [T] float32; None: no KL term.
            teacher_logprobs: [T] float32; None: no distillation.
            policy_top_logprobs: [T, K] float32, with gradient, of the same tokens as `teacher_top_logprobs`.
            teacher_top_logprobs: [T, K] float32, of a teacher's most likely tokens; None: only `teacher_logprobs`.
            entropy: [T] float32, of the distributions that predict the tokens; None: no entropy bonus.
            selected: [T] bool, see `rl_core.training.rows.with_selected`; None: the loss selects no tokens.

        Raises:
            ValueError: The number of values in a token column isn't the sum of the lengths.
        """
        lengths = response_lengths.to(device=policy_logprobs.device, dtype=torch.int64)
        columns: dict[str, Any] = {
            "policy_logprobs": policy_logprobs,
            "behavior_logprobs": behavior_logprobs,
            "advantages": advantages,
            "loss_mask": loss_mask,
            "sampler_logprobs": sampler_logprobs,
            "reference_logprobs": reference_logprobs,
            "teacher_logprobs": teacher_logprobs,
            "policy_top_logprobs": policy_top_logprobs,
            "teacher_top_logprobs": teacher_top_logprobs,
            "entropy": entropy,
            "selected": selected,
        }
        num_tokens = int(lengths.sum())
        for name, column in columns.items():
            if column is not None and column.shape[:1] != (num_tokens,):
                raise ValueError(f"{name} has shape {tuple(column.shape)}, but response_lengths add up to {num_tokens}")
        sequence_index = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        return cls(
            **columns,
            sequence_index=sequence_index,
            loss_tokens_per_sequence=torch.bincount(sequence_index[loss_mask], minlength=len(lengths)),
        )

    def select_trained(self) -> "LossInputs":
        """Return the inputs of the trained tokens only.

        Selecting them, instead of multiplying by the mask, keeps non-finite values of untrained tokens out of the
        gradient.
        """
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        del columns["loss_tokens_per_sequence"]
        selected: dict[str, Any] = {
            name: column[self.loss_mask] for name, column in columns.items() if column is not None
        }
        return replace(self, **selected)

    def finite_columns(self) -> dict[str, Tensor]:
        """Return, by name, the columns that are there whose values must be finite: log-probs, advantages, not entropy.

        An entropy that is only reported may be NaN; one that is trained on makes the loss NaN itself.
        """
        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "entropy"}
        return {name: values for name, values in columns.items() if values is not None and values.is_floating_point()}

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """Sum [T] values over the tokens of each sequence: [S]."""
        return values.new_zeros(len(self.loss_tokens_per_sequence)).index_add(0, self.sequence_index, values)


@dataclass(frozen=True)
class Surrogate:
    """The policy term of T trained tokens, minimized as a surrogate for the negative expected reward."""

    losses: Tensor  # [T], with gradient
    # [T], policy over behavior probability, as clipped by this loss; one of samples that uses none returns that of
    # `log_ratio`. None: of the cross-entropy alone, which has no samples.
    ratio: Tensor | None
    clipped: dict[str, Tensor]  # [T] bool by side, "low", "high", "dual" or "cov": the tokens that it clips; {}: none
    metrics: dict[str, Tensor] = field(default_factory=dict)  # [T] what else it reports, by name: means over tokens


def log_ratio(trained: LossInputs) -> Tensor:
    """Return the log of policy over behavior probability, [T], clamped below overflow; NaN stays NaN."""
    return (trained.policy_logprobs - trained.behavior_logprobs).clamp(max=MAX_LOG_RATIO)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Surrogate:
    """Compute PPO's pessimistic surrogate, max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), elementwise.

    Schulman et al. 2017, arXiv:1707.06347, equation 7; the two-sided range is DAPO's (arXiv:2503.14476).
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    is_clipped = clipped > plain
    sides = {"low": is_clipped & (advantages < 0), "high": is_clipped & (advantages > 0)}
    return Surrogate(losses=torch.maximum(plain, clipped), ratio=ratio, clipped=sides)


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
