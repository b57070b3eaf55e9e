"""One training prompt as the model sees it, and what the reward gives to its own answer, for `sluice plan`."""

from collections.abc import Iterator

import numpy as np
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from flows.answers import response_of
from infra.datasets import PromptDataset
from infra.datasets.prompts import PromptRow
from infra.datasets.sft import SftDataset
from infra.models.load import load_tokenizer
from infra.rewards.open import open_reward_scorer
from rl_core.rewards import RewardItem, RewardOutcome
from rl_core.rollout.chat import decode_text, decode_texts
from schemas.base import Frozen
from schemas.config.judge import JudgeReward
from schemas.config.reward import GroupFunctionReward, ModelReward, parts_of
from schemas.config.reward_base import IsolatedReward
from schemas.config.run import RunConfig

SHOWN_CHARACTERS, SHOWN_TOKENS = 600, 24
OPEN, CLOSE = "⟦", "⟧"  # around tokens with loss
TIMEOUT_SECONDS = 30.0  # of a reward without a limit


class SftExample(Frozen):
    """The rows of supervised fine-tuning, and the first one."""

    num_rows: int  # of all training data, without those that are too long
    num_dropped: int  # those that are
    num_tokens: int
    num_loss_tokens: int
    steps_per_epoch: float  # of several sources, of the one that takes the most
    steps_by_source: dict[str, float]  # of each of several
    text: str  # of the first row, with its tokens with loss in brackets


class Example(Frozen):
    """The first training prompt."""

    num_rows: int  # of all training data, without those that are too long
    num_dropped: int  # those that are
    data_source: str
    prompt: str  # what the chat template makes of the messages
    tokens: tuple[str, ...]  # the text of each token of it
    answer: str
    response: str  # which gives the answer as the reward compares it
    reward: float | None = None  # of the response; None: it failed, or is not computed
    parts: dict[str, float] = Field(default_factory=dict)
    without_reward: str = ""  # why there is none


def show_example(config: RunConfig, prompts: PromptDataset) -> Example | SftExample:
    """Return the first training prompt, and the reward of its own answer, which is computed in another process.

    Of supervised fine-tuning, it is the first row. The rewards of models, judges and environments are not computed, as
    they take more than this process.

    Raises:
        UserError: The reward can't be loaded there.
    """
    row, tokenizer = prompts[0], load_tokenizer(config.model)
    if isinstance(prompts, SftDataset):
        return _sft_example(config, prompts, tokenizer)
    ids = row.prompt_ids.tolist()
    example = Example(
        num_rows=len(prompts),
        num_dropped=prompts.num_dropped,
        data_source=row.data_source,
        prompt=decode_text(tokenizer, ids),
        tokens=tuple(decode_texts(tokenizer, [[token] for token in ids])),
        answer=row.answer,
        response=response_of(config.reward, row.answer),
    )
    if row.environment is not None or config.reward.reads_environment:
        return example.replace(without_reward="not computed: it is of the turns with an environment")
    if any(isinstance(each, JudgeReward | ModelReward) for each in parts_of(config.reward)):
        return example.replace(without_reward="not computed: a model gives it")
    outcome = _score(config, row, example.response)
    if outcome.reward is None:
        return example.replace(without_reward=f"failed: {outcome.failure}")
    return example.replace(reward=outcome.reward, parts=outcome.parts)


def _sft_example(config: RunConfig, rows: SftDataset, tokenizer: PreTrainedTokenizerBase) -> SftExample:
    assert config.sft is not None
    row = rows[0]
    edges = np.flatnonzero(np.diff(row.loss_mask)) + 1
    parts = np.split(row.response_ids, edges)  # with loss, without, with, ...
    steps = rows.steps_per_epoch(config.sft.num_rows)
    texts = decode_texts(tokenizer, [row.prompt_ids.tolist(), *(part.tolist() for part in parts)])
    return SftExample(
        num_rows=len(rows),
        num_dropped=rows.num_dropped,
        num_tokens=int(rows.prompt_lengths.sum() + rows.response_lengths.sum()),
        num_loss_tokens=rows.num_loss_tokens,
        steps_per_epoch=max(steps),
        steps_by_source=dict(zip(config.data.source_names, steps, strict=True)) if len(steps) > 1 else {},
        text="".join(f"{OPEN}{text}{CLOSE}" if at % 2 else text for at, text in enumerate(texts)),
    )


def example_lines(example: Example | SftExample) -> Iterator[str]:
    """Yield the example as text."""
    if isinstance(example, SftExample):
        yield from _sft_lines(example)
        return
    yield f"data: {example.num_rows:,} training prompts{_dropped(example.num_dropped)}"
    yield f"the first one, of {example.data_source!r}, as the model sees it: {_cut(repr(example.prompt))}"
    shown = [repr(token) for token in example.tokens]
    if len(shown) > SHOWN_TOKENS:
        shown[SHOWN_TOKENS // 2 : -SHOWN_TOKENS // 2] = ["..."]
    yield f"its {len(example.tokens):,} tokens: {' '.join(shown)}"
    parts = "".join(f", {name} {value:g}" for name, value in example.parts.items())
    reward = example.without_reward if example.reward is None else f"{example.reward:g}{parts}"
    response = "" if example.response == example.answer else f", {_cut(repr(example.response))}"
    yield f"reward of its answer, {_cut(repr(example.answer))}, as the whole response{response}: {reward}"


def _sft_lines(example: SftExample) -> Iterator[str]:
    by_source = ", ".join(f"of {name} {steps:,.4g}" for name, steps in example.steps_by_source.items())
    yield (
        f"data: {example.num_rows:,} training rows{_dropped(example.num_dropped)}, {example.num_tokens:,} tokens, "
        f"{example.num_loss_tokens:,} of them with loss; an epoch is {example.steps_per_epoch:,.4g} steps"
        f"{f' ({by_source})' if by_source else ''}"
    )
    yield f"the first one, with its tokens with loss in {OPEN} {CLOSE}: {_cut(repr(example.text))}"


def _dropped(count: int) -> str:
    return f" ({count:,} more are too long, and dropped)" if count else ""


def _score(config: RunConfig, row: PromptRow, response: str) -> RewardOutcome:
    reward = config.reward
    if isinstance(reward, IsolatedReward):  # in a process of its own in any case
        reward = reward.replace(num_processes=1, timeout_seconds=reward.timeout_seconds or TIMEOUT_SECONDS)
    num_items = config.rollout.samples_per_prompt if isinstance(reward, GroupFunctionReward) else 1
    scorer = open_reward_scorer(reward)
    try:
        scorer.wait_until_ready()
        with scorer.open_batch([0] * num_items) as batch:
            for number in range(num_items):
                batch.add(number, RewardItem(row.prompt_text, response, row.answer, row.info))
            return batch.finish()[0]
    finally:
        scorer.close()


def _cut(text: str) -> str:
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]} ... {text[-half:]} ({len(text):,} characters)"
