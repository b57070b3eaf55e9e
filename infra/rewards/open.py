"""Where a run's responses are scored."""

from infra.rewards.base import RewardScorer
from infra.rewards.local import LocalRewardScorer
from infra.rewards.pool import RewardPool
from rl_core.rewards import load_reward
from schemas.config.reward import IsolatedReward, RewardConfig


def open_reward_scorer(config: RewardConfig) -> RewardScorer:
    """Return the scorer of this config; processes load the reward function while the caller does something else.

    Raises:
        RewardImportError: The reward function can't be loaded here.
    """
    if not (isinstance(config, IsolatedReward) and config.needs_processes):
        return LocalRewardScorer(load_reward(config))
    pool = RewardPool(config)
    pool.start()
    return pool
