"""Advantages: `compute_advantages` of rows, and `prepare_updates`, which also shapes rewards and plans a step."""

from rl_core.advantages.estimators import compute_advantages
from rl_core.advantages.step import StepAdvantages, prepare_updates

__all__ = ["StepAdvantages", "compute_advantages", "prepare_updates"]
