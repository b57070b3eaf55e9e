"""The inputs and outputs of policy losses. T response tokens of one micro-batch, S sequences."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

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
    entropy: Tensor | None = None  # [T] float32, with gradient for an entropy bonus

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
        entropy: Tensor | None = None,
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
            entropy: [T] float32, of the distributions that predict the tokens; None: no entropy bonus.

        Raises:
            ValueError: The number of values in a token column isn't the sum of the lengths.
        """
        lengths = response_lengths.to(device=policy_logprobs.device, dtype=torch.int64)
        columns = {
            "policy_logprobs": policy_logprobs,
            "behavior_logprobs": behavior_logprobs,
            "advantages": advantages,
            "loss_mask": loss_mask,
            "sampler_logprobs": sampler_logprobs,
            "reference_logprobs": reference_logprobs,
            "entropy": entropy,
        }
        num_tokens = int(lengths.sum())
        for name, column in columns.items():
            if column is not None and column.shape != (num_tokens,):
                raise ValueError(f"{name} has shape {tuple(column.shape)}, but response_lengths add up to {num_tokens}")
        sequence_index = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        return cls(
            policy_logprobs=policy_logprobs,
            behavior_logprobs=behavior_logprobs,
            advantages=advantages,
            loss_mask=loss_mask,
            sequence_index=sequence_index,
            loss_tokens_per_sequence=torch.bincount(sequence_index[loss_mask], minlength=len(lengths)),
            sampler_logprobs=sampler_logprobs,
            reference_logprobs=reference_logprobs,
            entropy=entropy,
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

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """Sum [T] values over the tokens of each sequence: [S]."""
        return values.new_zeros(len(self.loss_tokens_per_sequence)).index_add(0, self.sequence_index, values)


@dataclass(frozen=True)
class Surrogate:
    """The policy term of T trained tokens, minimized as a surrogate for the negative expected reward."""

    losses: Tensor  # [T], with gradient
    ratio: Tensor  # [T], policy over behavior probability, as clipped by this loss
    clipped: dict[str, Tensor]  # [T] bool by side, "low", "high" or "dual": the tokens that it clips; {}: no clipping


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
