"""Advantages: how rewards are shaped, and what each row's is worth within its group."""

from rl_core.advantages.estimators import compute_advantages
from rl_core.advantages.step import StepAdvantages, compute_step

__all__ = ["StepAdvantages", "compute_advantages", "compute_step"]
