"""The rewards of a stored step's rows, by another reward function. N rows."""

import json
from collections.abc import Sequence
from contextlib import closing

from infra.history.stored import StoredStep, with_rewards
from infra.rewards.base import RewardScorer
from infra.rewards.open import open_reward_scorer
from infra.workers.reward import open_model_here
from rl_core.rewards import RewardItem, as_stored
from schemas.config.reward import RewardConfig
from schemas.errors import ConfigError
from schemas.rollout import RolloutHandle, check_failures

TEXTS = ("prompt_text", "response_text", "answer", "info")


def score_steps(steps: Sequence[StoredStep], config: RewardConfig) -> list[RolloutHandle]:
    """Return the steps' rollouts with the rewards that a config's function gives their rows.

    Raises:
        ConfigError: They can't be computed from the steps' columns.
        RewardImportError: The function can't be loaded.
        RewardFailureError: More rewards of a step failed than the config allows.
    """
    for stored in steps:
        _check_texts(stored)
    with closing(open_reward_scorer(config, open_model_here)) as scorer:
        scorer.wait_until_ready()
        return [_score(stored, scorer, config) for stored in steps]


def _check_texts(stored: StoredStep) -> None:
    """Check that a step's rewards can be computed from its columns.

    Raises:
        ConfigError: They can't: an environment answered, whose state is not stored, or the texts were left out.
    """
    if stored.has_turns:
        raise ConfigError(
            f"the rewards of step {stored.step} can't be computed again: they depend on an environment, whose state "
            "isn't stored; leave the reward as it is"
        )
    if not any(stored.columns["response_text"].to_pylist()):
        raise ConfigError(
            f"the rewards of step {stored.step} can't be computed again: its texts were left out; leave the reward as "
            "it is"
        )


def _score(stored: StoredStep, scorer: RewardScorer, config: RewardConfig) -> RolloutHandle:
    """Return the step's rollout with the rewards that a scorer gives its N rows, rounded as columns are."""
    texts = zip(*(stored.columns[name].to_pylist() for name in TEXTS), strict=True)
    items = [RewardItem(prompt, response, answer, json.loads(info)) for prompt, response, answer, info in texts]
    outcomes = scorer.score(items, stored.columns["group_id"].to_pylist())
    failure = next((outcome.failure for outcome in outcomes if outcome.failure is not None), None)
    rewards = [outcome.reward for outcome in outcomes]
    check_failures(rewards, failure, config.max_failure_fraction, f"step {stored.step}")
    names = sorted({name for outcome in outcomes for name in outcome.parts})
    parts = {name: [as_stored(outcome.parts.get(name)) for outcome in outcomes] for name in names}
    return with_rewards(stored.rollout, [as_stored(reward) for reward in rewards], parts)
