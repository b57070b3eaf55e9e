"""The policy loss, how its tokens are weighed, and its entropy bonus."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from schemas.base import Frozen
from schemas.config.kinds import default_kind

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


class _Loss(Frozen):
    # token_mean: every trained token of the update weighs alike. The others are means over its sequences: of the
    # mean of a sequence's tokens, of their sum, or of their sum over a constant (Dr. GRPO).
    aggregation: Aggregation = "token_mean"
    norm_tokens: PositiveFloat | None = None  # that constant; None: rollout.max_response_tokens
    entropy_coef: NonNegativeFloat = 0.0  # the bonus: so much times the entropy is taken off each token's loss

    @model_validator(mode="after")
    def _norm_is_used(self) -> "_Loss":
        if self.norm_tokens is not None and self.aggregation != "seq_mean_token_sum_norm":
            raise ValueError(
                f'norm_tokens is of aggregation "seq_mean_token_sum_norm", not of "{self.aggregation}"; leave it out'
            )
        return self


class ClippedLoss(_Loss):
    """PPO's clipped surrogate (arXiv:1707.06347); `clip_high > clip_low` is DAPO's clip-higher (arXiv:2503.14476)."""

    kind: Literal["clipped"] = "clipped"
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None  # bounds the loss of negative advantages (arXiv:1912.09729)


class GspoLoss(_Loss):
    """Clipped ratios of whole sequences (Zheng et al. 2025, arXiv:2507.18071)."""

    kind: Literal["gspo"] = "gspo"
    aggregation: Aggregation = "seq_mean_token_mean"
    clip_low: PositiveFloat = 3e-4
    clip_high: PositiveFloat = 4e-4


class CispoLoss(_Loss):
    """Log-probs weighed by clipped ratios that have no gradient (MiniMax 2025, arXiv:2506.13585)."""

    kind: Literal["cispo"] = "cispo"
    clip_low: PositiveFloat = 1.0  # 1: no lower bound
    clip_high: PositiveFloat = 0.2


LossConfig = Annotated[
    Annotated[ClippedLoss | GspoLoss | CispoLoss, Field(discriminator="kind")], default_kind("clipped")
]
