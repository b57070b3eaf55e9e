"""Sample responses and score them: rewards are computed while other responses are still being generated."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from torch.profiler import record_function
from transformers import PreTrainedTokenizerBase

from infra.datasets import PromptRow
from infra.engines.base import Generation, GenerationRequest, RolloutEngine, Sampling, generate
from infra.environments.episodes import Episodes
from infra.environments.journal import Journal
from infra.environments.trajectory import Trajectory
from infra.ray.tracing import span
from infra.rewards import RewardScorer
from rl_core.rewards import RewardItem, RewardOutcome
from rl_core.rollout.chat import decode_text


@dataclass(frozen=True)
class ScoredResponse:
    """One response, its text, its final answer, and its reward."""

    generation: Generation
    text: str  # without special tokens; of several turns, with them
    answer: str  # what was scored, without special tokens: the model's last turn
    outcome: RewardOutcome


@dataclass(frozen=True)
class ResponseStart:
    """What a response begins with."""

    prompt: PromptRow  # its prompt
    group: int  # the number of its prompt in the batch: those to one prompt are next to each other, and share a prefill
    seed: int  # the seed of its tokens
    environment_seed: int  # the seed of its environment, if there is one; all responses to a prompt have the same


class ResponseSampler:
    """Samples responses from an engine, and computes their rewards.

    Args:
        engine: The engine.
        scorer: The reward scorer.
        tokenizer: The tokenizer of the engine's model.
        episodes: Plays responses of several turns; None: a response is one turn.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        scorer: RewardScorer,
        tokenizer: PreTrainedTokenizerBase,
        episodes: Episodes | None = None,
    ) -> None:
        self.engine, self.episodes, self._scorer, self._tokenizer = engine, episodes, scorer, tokenizer

    def sample(
        self, starts: Sequence[ResponseStart], sampling: Sampling, journal: Journal | None = None
    ) -> tuple[list[PromptRow], list[ScoredResponse], dict[str, float]]:
        """Sample N responses together.

        Args:
            starts: What they begin with.
            sampling: How tokens are sampled.
            journal: Where turns and answers of environments are recorded; None: nowhere.

        Returns:
            Their prompts, to which an environment may have added; the responses; and the seconds of `generate` and of
            `reward`, the wait for rewards after the last response.
        """
        prompts, seeds = [start.prompt for start in starts], [start.seed for start in starts]
        responses: Iterator[tuple[int, Generation]]
        if self.episodes is not None:
            prompts = self.episodes.begin(prompts, [start.environment_seed for start in starts], journal)
            responses = self.episodes.play(prompts, seeds, sampling)
        else:
            requests = [
                GenerationRequest(same[0].prompt.prompt_ids, tuple(start.seed for start in same))
                for same in (list(members) for _, members in groupby(starts, key=lambda start: start.group))
            ]
            responses = generate(self.engine, requests, sampling)
        scored, seconds = self.score(prompts, [start.group for start in starts], responses)
        return prompts, scored, seconds

    def score(
        self, prompts: Sequence[PromptRow], groups: Sequence[int], responses: Iterator[tuple[int, Generation]]
    ) -> tuple[list[ScoredResponse], dict[str, float]]:
        """Compute the rewards of N responses while they are generated.

        Args:
            prompts: N prompts.
            groups: N, the group of each response: those to one prompt.
            responses: Each response with its number, in any order.

        Returns:
            The responses, and the seconds; see `sample`.
        """
        generated: dict[int, tuple[Generation, str, str]] = {}
        failed: dict[int, RewardOutcome] = {}
        started = time.perf_counter()
        with ExitStack() as reward_span, self._scorer.open_batch(groups) as batch:
            with span("rl.sample"), record_function("generate"):
                for number, generation in responses:
                    if not generated:  # rewards are computed from the first response on
                        reward_span.enter_context(span("rl.reward"))
                    answer = self._answer(generation)
                    text = self._decode(generation.token_ids, with_special_tokens=isinstance(generation, Trajectory))
                    generated[number] = generation, text, answer
                    if isinstance(generation, Trajectory) and generation.failure is not None:
                        failed[number] = RewardOutcome(reward=None, failure=f"environment, {generation.failure}")
                        batch.leave_out(number)
                    else:
                        batch.add(number, _reward_item(prompts[number], generation, answer))
            all_generated = time.perf_counter()
            with record_function("reward"):
                outcomes = batch.finish() | failed
        seconds = {"generate": all_generated - started, "reward": time.perf_counter() - all_generated}
        return [ScoredResponse(*generated[number], outcomes[number]) for number in range(len(prompts))], seconds

    def _answer(self, generation: Generation) -> str:
        token_ids = generation.last_turn_ids if isinstance(generation, Trajectory) else generation.token_ids
        return self._decode(token_ids, with_special_tokens=False)

    def _decode(self, token_ids: np.ndarray, *, with_special_tokens: bool) -> str:
        return decode_text(self._tokenizer, token_ids, skip_special_tokens=not with_special_tokens)


def _reward_item(prompt: PromptRow, generation: Generation, answer: str) -> RewardItem:
    """Return what the reward function gets."""
    trajectory = generation.reward_info() if isinstance(generation, Trajectory) else {}
    return RewardItem(prompt.prompt_text, answer, prompt.answer, prompt.info, trajectory)
