"""Reward scoring of responses while others are generated: in the rollout worker itself, or in processes it can kill.

`infra.rewards.open.open_reward_scorer` opens the scorer of a config. It is not imported here, because a reward process
(`infra.rewards.child`) imports this package too, and starts the faster the less that brings in.
"""

from infra.rewards.base import RewardBatch, RewardScorer

__all__ = ["RewardBatch", "RewardScorer"]
