"""Held-out evaluation: the batches of prompts, and mean@n, best@n and maj@n of their samples.

P prompts, m samples of a prompt whose reward is known. A sample whose reward failed is None and counts neither as
correct nor as wrong; a prompt without known samples is ignored. A metric over no prompts is None.
"""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

from rl_core.boxed import last_boxed
from schemas.config.rollout import EvalConfig
from schemas.config.run import RunConfig
from schemas.metrics import Metrics, merge_metrics, values
from schemas.rollout import check_failures
from schemas.step import EvalReport, EvalShard, SourceReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOutSample:
    """One scored response to a held-out prompt."""

    answer: int  # equal for equal answers to the same prompt
    reward: float | None  # None: it failed
    num_tokens: int
    truncated: bool  # the response reached the token limit


def split_prompts(config: EvalConfig, num_held_out: int) -> dict[int, range]:
    """Return the rows of each batch to evaluate, by its number, in the same way for any number of rollout workers.

    Args:
        config: The evaluation's settings.
        num_held_out: The number of held-out prompts, of which the first `num_prompts` are used.
    """
    num_prompts, size = min(config.num_prompts, num_held_out), config.batch_prompts
    return {first // size: range(first, min(first + size, num_prompts)) for first in range(0, num_prompts, size)}


def summarize(config: RunConfig, policy_version: int, shards: Sequence[EvalShard], seconds: float) -> EvalReport:
    """Compute the held-out metrics of one policy version, of all prompts and by data source.

    Args:
        config: The run's configuration.
        policy_version: The version.
        shards: Those of all batches, in order; at least one prompt.
        seconds: How long the evaluation took.

    Raises:
        RewardFailureError: More rewards failed than the config allows.
    """
    n, threshold = config.eval.samples_per_prompt, config.eval.accuracy_threshold
    failures = check_failures(
        [reward for shard in shards for reward in shard.rewards],
        next((shard.failure for shard in shards if shard.failure), None),
        config.reward.max_failure_fraction,
        "the evaluation",
    )
    if failures is not None:
        logger.warning(failures)
    samples, by_source = list[list[HeldOutSample]](), dict[str, list[list[HeldOutSample]]]()
    for shard in shards:
        for data_source, of_prompt in zip(shard.data_sources, _by_prompt(shard, n), strict=True):
            samples.append(of_prompt)
            by_source.setdefault(data_source, []).append(of_prompt)
    total = summarize_source("all", samples, n, threshold)
    assert total.mean_at_n is not None  # `check_failures`: some reward succeeded
    assert total.reward is not None
    return EvalReport(
        policy_version=policy_version,
        num_prompts=total.num_prompts,
        samples_per_prompt=n,
        accuracy=total.mean_at_n,
        reward=total.reward,
        num_failed=total.num_failed,
        seconds=seconds,
        sources=tuple(summarize_source(name, of_source, n, threshold) for name, of_source in by_source.items()),
    )


def summarize_source(
    data_source: str, samples: Sequence[Sequence[HeldOutSample]], n: int, threshold: float
) -> SourceReport:
    """Compute the held-out metrics of one data source.

    Args:
        data_source: Name of the source.
        samples: P >= 1 prompts, n samples of each.
        n: The number of samples per prompt.
        threshold: A reward of at least this counts as correct.
    """
    flat = [sample for prompt in samples for sample in prompt]
    rewards = [[sample.reward for sample in prompt] for prompt in samples]
    correct = [[None if reward is None else reward >= threshold for reward in prompt] for prompt in rewards]
    return SourceReport(
        data_source=data_source,
        num_prompts=len(samples),
        mean_at_n=mean_at_n(correct),
        best_at_n=best_at_n(correct, n),
        maj_at_n=maj_at_n([[sample.answer for sample in prompt] for prompt in samples], correct),
        reward=mean_at_n(rewards),
        num_failed=sum(sample.reward is None for sample in flat),
        response_tokens=fmean(sample.num_tokens for sample in flat),
        truncated=fmean(sample.truncated for sample in flat),
    )


def summarize_held_out(policy_version: int, num_rows: int, parts: Sequence[Metrics], seconds: float) -> EvalReport:
    """Return the report of supervised fine-tuning, from each rank's part of `loss` and `accuracy`."""
    found = values(merge_metrics(parts))
    return EvalReport(
        policy_version=policy_version,
        num_prompts=num_rows,
        accuracy=found["accuracy"],
        reward=None,
        num_failed=0,
        seconds=seconds,
        loss=found["loss"],
    )


def mean_at_n(scores: Sequence[Sequence[float | None]]) -> float | None:
    """Return the mean over prompts of the mean over each prompt's known samples.

    Args:
        scores: P sequences of samples: rewards, or whether they are correct.
    """
    known = [[score for score in samples if score is not None] for samples in scores]
    return _mean([fmean(samples) for samples in known if samples])


def best_at_n(correct: Sequence[Sequence[bool | None]], n: int) -> float | None:
    """Estimate the probability that at least one of n samples is correct, averaged over prompts.

    A prompt with m <= n known samples counts 1 if any of them is correct, else 0, which is a lower bound if some of
    its n samples failed. A prompt with m > n known samples, of which c are correct, counts as the unbiased estimate
    1 - C(m - c, n) / C(m, n) of Chen et al. 2021, arXiv:2107.03374.

    Args:
        correct: P sequences of samples.
        n: The number of attempts, at least 1.
    """
    known = [[sample for sample in samples if sample is not None] for samples in correct]
    return _mean([_best_of(sum(samples), len(samples), n) for samples in known if samples])


def maj_at_n(answers: Sequence[Sequence[Hashable]], correct: Sequence[Sequence[bool | None]]) -> float | None:
    """Return the fraction of prompts whose majority answer is correct; Wang et al. 2022, arXiv:2203.11171.

    Each known sample votes for its answer. The answer with the most votes wins, in a tie the one that occurs first; it
    is correct if the first sample with this answer is.

    Args:
        answers: P sequences of the samples' answers, see `number_answers`.
        correct: Whether the same samples are correct.
    """
    winners = []
    for given, known in zip(answers, correct, strict=True):
        votes: dict[Hashable, list[bool]] = {}
        for answer, sample in zip(given, known, strict=True):
            if sample is not None:
                votes.setdefault(answer, []).append(sample)
        if votes:
            winners.append(max(votes.values(), key=len)[0])
    return _mean(winners)


def number_answers(responses: Sequence[str]) -> list[int]:
    """Return for each response to one prompt the number of the first one with the same answer, from 0.

    The answer itself, which may be the whole response, then needn't leave the worker that generated it.
    """
    answers = [extract_answer(response) for response in responses]
    return [answers.index(answer) for answer in answers]


def extract_answer(response: str) -> str:
    """Return the content of the last complete box, see `last_boxed`, else the whole response without white space."""
    boxed = last_boxed(response)
    return response.strip() if boxed is None else boxed


def _by_prompt(shard: EvalShard, n: int) -> list[list[HeldOutSample]]:
    """Return the n samples of each prompt of a shard."""
    truncated = [reason == "length" for reason in shard.finish_reasons]
    columns = zip(shard.answers, shard.rewards, shard.response_lengths, truncated, strict=True)
    samples = [HeldOutSample(*sample) for sample in columns]
    return [samples[first : first + n] for first in range(0, len(samples), n)]


def _best_of(num_correct: int, num_samples: int, n: int) -> float:
    if num_samples <= n:
        return float(num_correct > 0)
    return 1 - comb(num_samples - num_correct, n) / comb(num_samples, n)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
