"""Scoring responses: in the rollout worker itself, or in processes that can be ended."""

from infra.rewards.scorer import Scorer, open_scorer

__all__ = ["Scorer", "open_scorer"]
