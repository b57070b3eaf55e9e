"""Open the reward scorer of a config."""

from infra.rewards.base import RewardScorer
from infra.rewards.groups import GroupRewardScorer
from infra.rewards.local import LocalRewardScorer
from infra.rewards.pool import RewardPool
from rl_core.rewards import load_reward
from schemas.config.reward import GroupFunctionReward, RewardConfig
from schemas.config.reward_base import IsolatedReward


def open_reward_scorer(config: RewardConfig) -> RewardScorer:
    """Return the config's scorer; its processes, if any, load the reward function in the background.

    Raises:
        RewardImportError: The reward function can't be loaded in this process.
    """
    scorer = _open(config)
    return GroupRewardScorer(scorer) if isinstance(config, GroupFunctionReward) else scorer


def _open(config: RewardConfig) -> RewardScorer:
    if not (isinstance(config, IsolatedReward) and config.needs_processes):
        return LocalRewardScorer(load_reward(config))
    pool = RewardPool(config)
    pool.start()
    return pool
