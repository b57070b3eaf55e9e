"""Assignment of rows to updates, ranks and micro-batches from lengths alone: `plan_step`, `plan_forward`, `pack`."""

from rl_core.planning.balance import imbalance
from rl_core.planning.pack import pack
from rl_core.planning.plan import plan_forward, plan_step

__all__ = ["imbalance", "pack", "plan_forward", "plan_step"]
