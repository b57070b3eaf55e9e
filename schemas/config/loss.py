"""The policy loss, its aggregation over tokens, its entropy bonus, its correction for the engine, and the KL term."""

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat, PositiveFloat, model_validator

from schemas.base import FrozenConfig
from schemas.config.kinds import default_kind

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
KlEstimator = Literal["k1", "k2", "k3"]


class _Loss(FrozenConfig):
    aggregation: Aggregation = "token_mean"
    """Mean over trained tokens, or over sequences of their token mean, token sum, or token sum / `norm_tokens`."""

    norm_tokens: PositiveFloat | None = None
    """Constant of `seq_mean_token_sum_norm` (Dr. GRPO), in tokens; None: `rollout.max_response_tokens`."""

    behavior: Literal["auto", "recompute"] = "auto"
    """Behavior log-probs: from the update's own forward where they are the same, or always from a pass before it."""

    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus, which is subtracted from each token's loss; 0: no bonus."""

    observation_coef: NonNegativeFloat = 0.0
    """Coefficient of the mean cross-entropy of an environment's tokens (ECHO, arXiv:2605.24517); 0: not trained on."""

    @model_validator(mode="after")
    def _norm_is_used(self) -> "_Loss":
        if self.norm_tokens is not None and self.aggregation != "seq_mean_token_sum_norm":
            raise ValueError(
                f'norm_tokens is only for aggregation "seq_mean_token_sum_norm", not for "{self.aggregation}"; '
                "remove it or change the aggregation"
            )
        return self


class ClippedLoss(_Loss):
    """PPO's clipped surrogate (arXiv:1707.06347); `clip_high > clip_low` is DAPO's clip-higher (arXiv:2503.14476)."""

    kind: Literal["clipped"] = "clipped"

    clip_low: PositiveFloat = 0.2
    """Probability ratios are clipped to at least 1 - `clip_low`."""

    clip_high: PositiveFloat = 0.2
    """Probability ratios are clipped to at most 1 + `clip_high`."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bounds a negative advantage's loss to this factor times its absolute value (arXiv:1912.09729); None: no bound."""


class GspoLoss(_Loss):
    """Clipped ratios of whole sequences (Zheng et al. 2025, arXiv:2507.18071)."""

    kind: Literal["gspo"] = "gspo"

    aggregation: Aggregation = "seq_mean_token_mean"
    """Mean over trained tokens, or over sequences of their token mean, token sum, or token sum / `norm_tokens`."""

    clip_low: PositiveFloat = 3e-4
    """Sequence ratios are clipped to at least 1 - `clip_low`."""

    clip_high: PositiveFloat = 4e-4
    """Sequence ratios are clipped to at most 1 + `clip_high`."""


class CispoLoss(_Loss):
    """Log-probs weighted by clipped ratios without gradient (MiniMax 2025, arXiv:2506.13585)."""

    kind: Literal["cispo"] = "cispo"

    clip_low: PositiveFloat = 1.0
    """Weights are clipped to at least 1 - `clip_low`; 1: no lower bound."""

    clip_high: PositiveFloat = 0.2
    """Weights are clipped to at most 1 + `clip_high`."""


class SapoLoss(_Loss):
    """Ratios through a sigmoid, a soft gate in place of clipping (Gao et al. 2025, arXiv:2511.20347)."""

    kind: Literal["sapo"] = "sapo"

    aggregation: Aggregation = "seq_mean_token_mean"
    """Mean over trained tokens, or over sequences of their token mean, token sum, or token sum / `norm_tokens`."""

    tau_positive: PositiveFloat = 1.0
    """Temperature of the gate for positive advantages; a larger one closes it faster."""

    tau_negative: PositiveFloat = 1.05
    """Temperature of the gate for negative advantages."""


class GmpoLoss(_Loss):
    """Geometric means of clipped ratios over sequences (Zhao et al. 2025, arXiv:2507.20673)."""

    kind: Literal["gmpo"] = "gmpo"

    aggregation: Aggregation = "seq_mean_token_mean"
    """Mean over trained tokens, or over sequences of their token mean, token sum, or token sum / `norm_tokens`."""

    clip_low: PositiveFloat = 0.4
    """Log-ratios of tokens are clipped to at least -`clip_low`, in nats."""

    clip_high: PositiveFloat = 0.4
    """Log-ratios of tokens are clipped to at most `clip_high`, in nats."""


class DppoLoss(_Loss):
    """Ratios, masked where the probability moved too far from the sampler's (Qi et al. 2026, arXiv:2602.04879)."""

    kind: Literal["dppo"] = "dppo"

    divergence: Literal["tv", "kl"] = "tv"
    """Difference of the token's probability and the sampler's (`tv`), or their binary KL in nats (`kl`)."""

    clip_low: PositiveFloat = 0.15
    """Masks tokens of negative advantage whose probability fell by a larger divergence; for `kl`, 0.05 is usual."""

    clip_high: PositiveFloat = 0.15
    """Masks tokens of positive advantage whose probability rose by a larger divergence; for `kl`, 0.05 is usual."""


class CovarianceLoss(_Loss):
    """What losses have that select tokens by their covariance (Cui et al. 2025, arXiv:2505.22617)."""

    share: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Fraction of an update's trained tokens that are selected, rounded down, at least one."""


class ClipCovLoss(CovarianceLoss):
    """PPO's clipped surrogate, with a few tokens of high covariance masked (Cui et al. 2025, arXiv:2505.22617)."""

    kind: Literal["clip_cov"] = "clip_cov"

    clip_low: PositiveFloat = 0.2
    """Probability ratios are clipped to at least 1 - `clip_low`."""

    clip_high: PositiveFloat = 0.2
    """Probability ratios are clipped to at most 1 + `clip_high`."""

    cov_low: FiniteFloat = 1.0
    """Tokens are drawn among those with a covariance above this, in nats times the unit of advantages."""

    cov_high: FiniteFloat = 5.0
    """Tokens are drawn among those with a covariance below this."""

    @model_validator(mode="after")
    def _ordered(self) -> "ClipCovLoss":
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low = {self.cov_low} must be below cov_high = {self.cov_high}")
        return self


class KlCovLoss(CovarianceLoss):
    """KL-Cov: a KL penalty on the tokens of highest covariance, after a step's first update (arXiv:2505.22617)."""

    kind: Literal["kl_cov"] = "kl_cov"

    behavior: Literal["auto"] = "auto"
    """In a step's first update, behavior log-probs are those of its own forward: the penalty is exactly 0 there."""

    kl_coef: PositiveFloat = 1.0
    """Coefficient of the penalty, the absolute difference of policy and behavior log-prob of a selected token."""


class CrossEntropyLoss(_Loss):
    """The cross-entropy of given tokens, for supervised fine-tuning."""

    kind: Literal["cross_entropy"] = "cross_entropy"


LossConfig = Annotated[
    Annotated[
        ClippedLoss
        | GspoLoss
        | CispoLoss
        | SapoLoss
        | GmpoLoss
        | DppoLoss
        | ClipCovLoss
        | KlCovLoss
        | CrossEntropyLoss,
        Field(discriminator="kind"),
    ],
    default_kind("clipped"),
]


class KlConfig(FrozenConfig):
    """The KL term; below, x = reference log-prob - policy log-prob of a token, in nats."""

    coef: NonNegativeFloat = 0.0
    """Coefficient of the KL term; 0: no KL term, and no reference model is loaded."""

    estimator: KlEstimator = "k3"
    """k1 = -x (for the reward; as a loss its mean gradient is 0), k2 = x^2 / 2 or k3 = e^x - x - 1."""

    in_reward: bool = False
    """Subtract the KL, summed over a row's trained tokens, from its reward, instead of adding it to the loss."""


class NoCorrection(FrozenConfig):
    """No correction; the mismatch is only reported."""

    kind: Literal["none"] = "none"


class TruncatedCorrection(FrozenConfig):
    """Truncated importance sampling: weight tokens by min(exp(behavior - sampler log-prob), cap).

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """

    kind: Literal["truncated"] = "truncated"

    level: Literal["token", "sequence"] = "token"
    """Weight of each token (`token`), or the product over its sequence's trained tokens (`sequence`)."""

    cap: PositiveFloat = 2.0
    """Upper bound of the weights."""


class MaskedCorrection(FrozenConfig):
    """Masked importance sampling: weight tokens by exp(behavior - sampler log-prob), and mask out-of-bounds weights.

    At the token level it is IcePop, whose bounds are the defaults (Ling Team 2025, arXiv:2510.18855).
    """

    kind: Literal["masked"] = "masked"

    level: Literal["token", "sequence"] = "token"
    """Weight of each token (`token`), or the product over its sequence's trained tokens (`sequence`)."""

    low: PositiveFloat = 0.5
    """Tokens with a smaller weight are masked: their policy term is 0."""

    high: PositiveFloat = 5.0
    """Tokens with a larger weight are masked: their policy term is 0."""

    @model_validator(mode="after")
    def _ordered(self) -> "MaskedCorrection":
        _check_bounds(self.low, self.high)
        return self


class RejectedCorrection(FrozenConfig):
    """Rejection sampling: mask tokens or whole responses with out-of-bounds weights, and train the others unweighted.

    By the geometric mean, a bound is the same for responses of any length (Liu et al. 2025, "When speed kills
    stability: demystifying RL collapse from the training-inference mismatch").
    """

    kind: Literal["rejected"] = "rejected"

    level: Literal["token", "sequence", "geometric"] = "geometric"
    """What must be within: each token's weight, their product over its sequence, or their geometric mean over it."""

    low: PositiveFloat = 0.999
    """Tokens or responses below are masked: their policy term is 0. The default is for `geometric`."""

    high: PositiveFloat = 1.001
    """Tokens or responses above are masked: their policy term is 0. The default is for `geometric`."""

    cap: PositiveFloat | None = None
    """Weight the tokens that are left by min(exp(behavior - sampler log-prob), cap); None: by 1."""

    @model_validator(mode="after")
    def _ordered(self) -> "RejectedCorrection":
        _check_bounds(self.low, self.high)
        return self


def _check_bounds(low: float, high: float) -> None:
    if low >= high:
        raise ValueError(f"low = {low} must be below high = {high}")


CorrectionConfig = Annotated[
    Annotated[NoCorrection | TruncatedCorrection | MaskedCorrection | RejectedCorrection, Field(discriminator="kind")],
    default_kind("truncated"),
]
