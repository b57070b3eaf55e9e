"""Open the reward scorer of a config."""

from collections.abc import Callable, Iterator
from contextlib import closing

from infra.rewards.base import RewardScorer
from infra.rewards.group_rewards import REMAINDER, GroupRewardScorer, SumRewardScorer
from infra.rewards.local import LocalRewardScorer
from infra.rewards.pool import RewardPool
from rl_core.rewards import load_reward
from schemas.config.reward import (
    GroupFunctionReward,
    ModelReward,
    RewardConfig,
    WeightedReward,
    reward_models,
    user_functions,
)
from schemas.config.reward_base import IsolatedReward

OpenModel = Callable[[ModelReward], RewardScorer]
"""Opens a scorer of whole groups for a reward model; called for those of a config in their order."""


def open_reward_scorer(config: RewardConfig, open_model: OpenModel | None = None) -> RewardScorer:
    """Return the config's scorer; its processes, if any, load the reward function in the background.

    Args:
        config: The reward.
        open_model: Opens the scorer of each reward model in it; None: there is none.

    Raises:
        RewardImportError: The reward function can't be loaded in this process.
        ModelError: A reward model can't be used.
    """
    if isinstance(config, ModelReward):
        assert open_model is not None, "reward models need what opens their scorers"
        return GroupRewardScorer(open_model(config), by_prompt=True)
    if isinstance(config, WeightedReward) and reward_models(config):
        return SumRewardScorer(
            dict(_open_parts(config, open_model)), {name: part.weight for name, part in config.parts.items()}
        )
    scorer = _open(config)
    return GroupRewardScorer(scorer) if isinstance(config, GroupFunctionReward) else scorer


def check_reward(config: RewardConfig) -> None:
    """Load a reward: users' functions in a process first, as importing their module may end it, then in this one.

    Raises:
        RewardImportError: It can't be loaded.
    """
    for function in user_functions(config):
        with closing(_open(function.replace(num_processes=1))) as scorer:
            scorer.wait_until_ready()
    load_reward(config)


def _open_parts(config: WeightedReward, open_model: OpenModel | None) -> Iterator[tuple[str, RewardScorer]]:
    rest = {name: part for name, part in config.parts.items() if not isinstance(part.reward, ModelReward)}
    if rest:
        yield REMAINDER, _open(config.model_copy(update={"parts": rest}))  # not validated: all weights may be 0
    for name, part in config.parts.items():
        if isinstance(part.reward, ModelReward):
            yield name, open_reward_scorer(part.reward, open_model)


def _open(config: RewardConfig) -> RewardScorer:
    if not (isinstance(config, IsolatedReward) and config.needs_processes):
        return LocalRewardScorer(load_reward(config))
    pool = RewardPool(config)
    pool.start()
    return pool
