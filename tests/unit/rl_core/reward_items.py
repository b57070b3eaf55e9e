"""Items to score, and the rewards of single items."""

from pydantic import TypeAdapter

from rl_core.rewards import RewardItem, RewardOutcome, load_reward, score_all
from schemas.config.reward import RewardConfig


def item(completion: str = "4", answer: str = "4", **info: object) -> RewardItem:
    return RewardItem(prompt="2 + 2 =", completion=completion, answer=answer, info=info)


def outcome_of(score: object):
    (outcome,) = score_all(lambda *_: score, [item()])
    return outcome


def reward_of(kind: str, completion: str, answer: str = "", **config: object) -> RewardOutcome:
    function = load_reward(config_of(kind, **config))
    (outcome,) = score_all(function, [item(completion, answer)])
    return outcome


def config_of(kind: str, **config: object) -> RewardConfig:
    return TypeAdapter(RewardConfig).validate_python({"kind": kind, **config})
