"""Scoring responses while others are generated: in the rollout worker itself, or in processes that can be ended."""

from infra.rewards.base import Scorer, Scoring
from infra.rewards.scorer import open_scorer

__all__ = ["Scorer", "Scoring", "open_scorer"]
