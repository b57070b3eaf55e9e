"""Policy losses: a new one is a config variant, a module and a line in `_LOSSES`."""

from torch import Tensor

from rl_core.losses.base import LossInputs, PolicyLoss
from rl_core.losses.clipped import clipped_loss
from schemas.config.loss import LossConfig
from schemas.metrics import Metrics

__all__ = ["LossInputs", "policy_loss"]

_LOSSES: dict[str, PolicyLoss] = {"clipped": clipped_loss}


def policy_loss(
    inputs: LossInputs, config: LossConfig, *, num_loss_tokens: int, num_live_sequences: int
) -> tuple[Tensor, Metrics]:
    """The micro-batch's share of the update's loss, by the config's `kind`, and its metrics.

    Args:
        inputs: The micro-batch's tokens.
        config: Which loss, with its parameters.
        num_loss_tokens: Loss tokens of the whole update, over all ranks; the plan has it.
        num_live_sequences: Sequences with a loss token of the whole update, over all ranks; the plan has it.

    Returns:
        A scalar with gradient; the shares of all micro-batches on all ranks add up to the update's loss.
    """
    return _LOSSES[config.kind](inputs, config, num_loss_tokens=num_loss_tokens, num_live_sequences=num_live_sequences)
