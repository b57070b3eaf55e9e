"""How the policy is held to the reference."""

from typing import Literal

from pydantic import NonNegativeFloat

from schemas.base import Frozen

KlEstimator = Literal["k1", "k2", "k3"]


class KlConfig(Frozen):
    """The KL term; x = reference log-prob - log-prob of a token, in nats."""

    coef: NonNegativeFloat = 0.0  # 0: no reference model is loaded
    estimator: KlEstimator = "k3"  # -x, x^2 / 2, e^x - x - 1; k1 is for the reward, as a loss it pulls nowhere
    in_reward: bool = False  # taken off the row's reward, summed over its trained tokens, instead of added to the loss
