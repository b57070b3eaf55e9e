"""Sample responses and score them: rewards are computed while other responses are still being generated."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch.profiler import record_function
from transformers import PreTrainedTokenizerBase

from infra.datasets import PromptRow
from infra.engines.base import Generation, GenerationRequest, RolloutEngine, Sampling
from infra.ray.tracing import span
from infra.rewards import RewardScorer
from rl_core.rewards import RewardItem, RewardOutcome


@dataclass(frozen=True)
class ScoredResponse:
    """One response, its text without special tokens, and its reward."""

    generation: Generation
    text: str
    outcome: RewardOutcome


class ResponseSampler:
    """Samples responses from an engine, and computes their rewards.

    Args:
        engine: The engine.
        scorer: The reward scorer.
        tokenizer: The tokenizer of the engine's model.
    """

    def __init__(self, engine: RolloutEngine, scorer: RewardScorer, tokenizer: PreTrainedTokenizerBase) -> None:
        self.engine, self._scorer, self._tokenizer = engine, scorer, tokenizer

    def sample(
        self, prompts: Sequence[PromptRow], seeds: Sequence[tuple[int, ...]], sampling: Sampling
    ) -> tuple[list[ScoredResponse], dict[str, float]]:
        """Sample one response per prompt and seed.

        Args:
            prompts: P prompts.
            seeds: P tuples, one seed per response.
            sampling: How tokens are sampled.

        Returns:
            The responses, prompt by prompt; and the seconds of `generate` and of `reward`, the wait for rewards after
            the last response.
        """
        requests = [GenerationRequest(prompt.prompt_ids, own) for prompt, own in zip(prompts, seeds, strict=True)]
        groups = [group for group, own in enumerate(seeds) for _ in own]
        return self.score([prompts[group] for group in groups], groups, self.engine.generate(requests, sampling))

    def score(
        self, prompts: Sequence[PromptRow], groups: Sequence[int], responses: Iterator[tuple[int, Generation]]
    ) -> tuple[list[ScoredResponse], dict[str, float]]:
        """Compute the rewards of N responses while they are generated.

        Args:
            prompts: N prompts.
            groups: N, the group of each response: those to one prompt.
            responses: Each response with its number, in any order.

        Returns:
            As `sample`.
        """
        generated: dict[int, tuple[Generation, str]] = {}
        started = time.perf_counter()
        with ExitStack() as reward_span, self._scorer.open_batch(groups) as batch:
            with span("rl.sample"), record_function("generate"):
                for number, generation in responses:
                    if not generated:  # rewards are computed from the first response on
                        reward_span.enter_context(span("rl.reward"))
                    text = str(self._tokenizer.decode(generation.token_ids, skip_special_tokens=True))
                    prompt = prompts[number]
                    batch.add(number, RewardItem(prompt.prompt_text, text, prompt.answer, prompt.info))
                    generated[number] = generation, text
            all_generated = time.perf_counter()
            with record_function("reward"):
                outcomes = batch.finish()
        seconds = {"generate": all_generated - started, "reward": time.perf_counter() - all_generated}
        return [ScoredResponse(*generated[number], outcomes[number]) for number in range(len(prompts))], seconds
