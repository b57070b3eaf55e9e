"""Policy losses: `policy_loss` of `LossInputs`; a new one is a config class, and a function in `surrogates.py`."""

from torch import Tensor

from rl_core.losses.base import LossInputs, aggregate, denominator, log_ratio
from rl_core.losses.correction import correction_weights
from rl_core.losses.distillation import distill
from rl_core.losses.kl import kl_estimate
from rl_core.losses.report import nan_unless_finite, report
from rl_core.losses.surrogates import SURROGATES
from schemas.config.distillation import DistillationConfig
from schemas.config.loss import CorrectionConfig, KlConfig, LossConfig
from schemas.metrics import Mean, Metrics

__all__ = ["LossInputs", "policy_loss"]


def policy_loss(
    inputs: LossInputs,
    loss: LossConfig,
    kl: KlConfig,
    correction: CorrectionConfig,
    *,
    norm_tokens: float,
    num_loss_tokens: int,
    num_live_sequences: int,
    num_observation_tokens: int = 0,
    distillation: DistillationConfig | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute a micro-batch's part of the update's loss, and its metrics.

    Per trained token: the policy term of the loss's `kind` times the correction's weight, plus `kl.coef` times the
    KL estimate (unless it is in the reward), minus `entropy_coef` times the entropy. The mean cross-entropy of the
    response tokens that are not trained on, times `observation_coef`, is added to that (ECHO, arXiv:2605.24517).

    Args:
        inputs: The micro-batch's tokens; without a trained token, the loss is a zero with a graph.
        loss: The policy term, its aggregation, and the entropy bonus.
        kl: The KL term.
        correction: The importance correction of the mismatch between the engine's log-probs and the trainer's.
        norm_tokens: The constant of `seq_mean_token_sum_norm`: `loss.norm_tokens`, or if that is None the maximum
            response length, in tokens.
        num_loss_tokens: Loss tokens of the whole update, over all ranks; from the plan.
        num_live_sequences: Sequences of the whole update with a loss token, over all ranks; from the plan.
        num_observation_tokens: Their response tokens without loss, over all ranks; from the plan.
        distillation: How the teacher's log-probs change advantages or loss; None: there is no teacher.

    Returns:
        A scalar with gradient, and metrics that merge exactly; the losses of all micro-batches on all ranks add up to
        the update's loss. It is NaN if any trained token has a log-prob or an advantage that isn't finite, even one
        that is only reported.

    Raises:
        ValueError: The loss, the KL term, the entropy bonus, the correction or the distillation needs a column that the
            inputs lack, or the tokens of the observations are not counted.

    Example:
        >>> import torch
        >>> from schemas.config.loss import ClippedLoss, NoCorrection
        >>> inputs = LossInputs.from_rows(
        ...     policy_logprobs=torch.tensor([-1.0, -1.0, -2.0], requires_grad=True),
        ...     behavior_logprobs=torch.tensor([-1.0, -1.0, -2.0]),
        ...     advantages=torch.tensor([1.0, 1.0, -0.5]),
        ...     loss_mask=torch.tensor([True, True, True]),
        ...     response_lengths=torch.tensor([2, 1]),
        ... )
        >>> counts = {"norm_tokens": 1, "num_loss_tokens": 3, "num_live_sequences": 2}
        >>> loss, metrics = policy_loss(inputs, ClippedLoss(), KlConfig(), NoCorrection(), **counts)
        >>> loss.item(), metrics["ratio"].value
        (-0.5, 1.0)
    """
    trained, divergences, distilled = distill(inputs.select_trained(), distillation)
    surrogate = SURROGATES(loss, trained)
    weights, token_metrics = correction_weights(trained, correction)
    token_losses = surrogate.losses if weights is None else surrogate.losses * weights
    penalties, penalty_metrics = _penalties(trained, loss, kl)
    token_metrics |= penalty_metrics | distilled | surrogate.metrics
    if surrogate.ratio is not None:
        token_metrics["approx_kl"] = kl_estimate("k3", log_ratio(trained))
    loss_sum = aggregate(token_losses + penalties + divergences, trained, loss.aggregation) + nan_unless_finite(trained)
    update_denominator = denominator(loss.aggregation, norm_tokens, num_loss_tokens, num_live_sequences)
    num_sequences = int((trained.loss_tokens_per_sequence > 0).sum())
    own_denominator = denominator(loss.aggregation, norm_tokens, len(token_losses), num_sequences)
    metrics = report(trained, surrogate, token_metrics, loss_sum, own_denominator)
    observed, observed_metrics = _observations(inputs, loss.observation_coef, num_observation_tokens)
    return loss_sum / update_denominator + observed, metrics | observed_metrics


def _observations(inputs: LossInputs, coef: float, num_tokens: int) -> tuple[Tensor | float, Metrics]:
    """Compute this micro-batch's part of the observations' loss, over `num_tokens` of the whole update."""
    if not coef:
        return 0.0, {}
    is_live = inputs.loss_tokens_per_sequence[inputs.sequence_index] > 0
    losses = -inputs.policy_logprobs[is_live & ~inputs.loss_mask]
    if len(losses) > num_tokens:
        raise ValueError(
            f"loss.observation_coef is {coef}, and {len(losses)} tokens have no loss, but the plan counts {num_tokens} "
            "of the update; make the plan with this version of Sluice"
        )
    total = losses.sum()
    metrics: Metrics = {"observation_cross_entropy": Mean(total=total.item(), weight=len(losses))}
    return coef * total / max(1, num_tokens), metrics


def _penalties(trained: LossInputs, loss: LossConfig, kl: KlConfig) -> tuple[Tensor | float, dict[str, Tensor]]:
    """Compute the terms to add to each trained token's policy term, and the KL and entropy to report."""
    penalties: Tensor | float = 0.0
    metrics: dict[str, Tensor] = {}
    if trained.reference_logprobs is not None:
        metrics["kl"] = kl_estimate(kl.estimator, trained.reference_logprobs - trained.policy_logprobs)
    if trained.entropy is not None:
        metrics["entropy"] = trained.entropy
    if kl.coef and not kl.in_reward:
        if "kl" not in metrics:
            raise ValueError(f"kl.coef is {kl.coef}, but the inputs lack reference_logprobs; add them or set it to 0")
        penalties = penalties + kl.coef * metrics["kl"]
    if loss.entropy_coef:
        if "entropy" not in metrics:
            raise ValueError(
                f"loss.entropy_coef is {loss.entropy_coef}, but the inputs lack entropy; add it or set it to 0"
            )
        penalties = penalties - loss.entropy_coef * metrics["entropy"]
    return penalties, metrics
