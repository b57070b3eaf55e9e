"""The check that the built-in rewards take each answer of the data for right."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from infra.datasets import PromptDataset
from infra.rewards.open import open_reward_scorer
from rl_core.rewards import RESPONSES, Respond, RewardItem, RewardOutcome
from schemas.config.data import LevelCurriculum
from schemas.config.reward import ReasoningGymReward, RewardConfig, parts_of
from schemas.config.run import RunConfig
from schemas.errors import DataError

NO_ANSWER = "None"  # of a row of reasoning-gym's tasks that have many right answers, such as a sequence of moves


def response_of(reward: RewardConfig, answer: str) -> str:
    """Return a response that gives an answer as a reward, of a sum a part of it, compares it; else the answer."""
    responses = [respond(answer) for _, respond in _compared(reward)]
    return next((response for response in responses if response != answer), answer)


def check_answers(config: RunConfig, prompts: PromptDataset, held_out: PromptDataset | None) -> None:
    """Check that each answer is right by the rewards that compare responses with it.

    Raises:
        DataError: An answer doesn't match itself, so that no response to its prompt could be right.
        RewardImportError: A reward can't be loaded.
    """
    train_paths = [source.path for source in config.data.train_sources]
    in_order = len(train_paths) == 1 and not isinstance(config.data.curriculum, LevelCurriculum)
    for reward, respond in _compared(config.reward):
        _check(reward, respond, " or ".join(train_paths), prompts, in_order=in_order)
        if held_out is not None:
            _check(reward, respond, str(config.data.eval_path), held_out, in_order=True)


def _compared(reward: RewardConfig) -> Iterator[tuple[RewardConfig, Respond]]:
    for each in parts_of(reward):
        if (respond := RESPONSES(each)) is not None:
            yield each, respond


def _check(reward: RewardConfig, respond: Respond, path: str, prompts: PromptDataset, *, in_order: bool) -> None:
    is_of_row = isinstance(reward, ReasoningGymReward)  # whose verifiers read the row's metadata
    first: dict[str | int, int] = {}  # row of each answer
    for number in range(len(prompts)):
        first.setdefault(number if is_of_row else prompts[number].answer, number)
    rows = [prompts[number] for number in first.values()]
    items = [RewardItem(row.prompt_text, respond(row.answer), row.answer, row.info) for row in rows]
    with ThreadPoolExecutor(1) as thread:  # as an event loop runs in this one if the flow is a deployment's
        outcomes = thread.submit(_score, reward, items).result()
    for number, row, outcome in zip(first.values(), rows, outcomes, strict=True):
        is_open = is_of_row and row.answer == NO_ANSWER and outcome.failure is None
        if outcome.reward != 1.0 and not is_open:
            place = f"{path}, row {number + 1}" if in_order and not prompts.num_dropped else path
            raise DataError(_message(place, row.prompt_text, row.answer, reward.kind, outcome))


def _score(reward: RewardConfig, items: Sequence[RewardItem]) -> list[RewardOutcome]:
    with closing(open_reward_scorer(reward)) as scorer:
        return scorer.score(items)


def _message(place: str, prompt: str, answer: str, kind: str, outcome: RewardOutcome) -> str:
    reason = outcome.failure or f"even the answer itself, as a response, gets {outcome.reward:g} instead of 1"
    return (
        f"{place}: by reward.kind {kind!r} no response to {prompt!r:.60} can be right, as its answer {answer!r:.60} "
        f"doesn't match itself: {reason}; correct the answer, remove the row, or choose another reward"
    )
