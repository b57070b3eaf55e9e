"""Which rows make up each update, rank and micro-batch: decided on the driver, from lengths alone."""

from rl_core.planning.balance import imbalance
from rl_core.planning.pack import pack
from rl_core.planning.plan import plan_forward, plan_step

__all__ = ["imbalance", "pack", "plan_forward", "plan_step"]
