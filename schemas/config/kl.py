"""The KL term between the policy and the reference."""

from typing import Literal

from pydantic import NonNegativeFloat

from schemas.base import FrozenConfig

KlEstimator = Literal["k1", "k2", "k3"]


class KlConfig(FrozenConfig):
    """The KL term; below, x = reference log-prob - policy log-prob of a token, in nats."""

    coef: NonNegativeFloat = 0.0
    """Coefficient of the KL term; 0: no KL term, and no reference model is loaded."""

    estimator: KlEstimator = "k3"
    """k1 = -x (for the reward; as a loss its mean gradient is 0), k2 = x^2 / 2 or k3 = e^x - x - 1."""

    in_reward: bool = False
    """Subtract the KL, summed over a row's trained tokens, from its reward, instead of adding it to the loss."""
