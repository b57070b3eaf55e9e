"""mean@n, best@n and maj@n of held-out samples.

P prompts, m samples of a prompt whose reward is known. A sample whose reward failed is None and counts neither as
correct nor as wrong; a prompt without known samples is ignored. A metric over no prompts is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

from schemas.step import SourceReport

BOXED = "\\boxed{"


@dataclass(frozen=True)
class HeldOutSample:
    """One scored response to a held-out prompt."""

    text: str
    reward: float | None  # None: it failed
    num_tokens: int
    truncated: bool  # the response reached the token limit


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
        maj_at_n=maj_at_n([[extract_answer(sample.text) for sample in prompt] for prompt in samples], correct),
        reward=mean_at_n(rewards),
        num_failed=sum(sample.reward is None for sample in flat),
        response_tokens=fmean(sample.num_tokens for sample in flat),
        truncated=fmean(sample.truncated for sample in flat),
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


def maj_at_n(answers: Sequence[Sequence[str]], correct: Sequence[Sequence[bool | None]]) -> float | None:
    """Return the fraction of prompts whose majority answer is correct; Wang et al. 2022, arXiv:2203.11171.

    Each known sample votes for its answer. The answer with the most votes wins, in a tie the one that occurs first; it
    is correct if the first sample with this answer is.

    Args:
        answers: P sequences of the samples' answers, see `extract_answer`.
        correct: Whether the same samples are correct.
    """
    winners = []
    for given, known in zip(answers, correct, strict=True):
        votes: dict[str, list[bool]] = {}
        for answer, sample in zip(given, known, strict=True):
            if sample is not None:
                votes.setdefault(answer, []).append(sample)
        if votes:
            winners.append(max(votes.values(), key=len)[0])
    return _mean(winners)


def extract_answer(response: str) -> str:
    """Return the content of the last complete `\\boxed{}`, else the whole response, without surrounding white space."""
    start = response.rfind(BOXED)
    while start >= 0:
        content = _braced(response, start + len(BOXED))
        if content is not None:
            return content.strip()
        start = response.rfind(BOXED, 0, start)
    return response.strip()


def _braced(text: str, start: int) -> str | None:
    """Return the text from `start` to the brace that closes the one before it, or None. `\\{` doesn't count."""
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return text[start:at]
        at += 1
    return None


def _best_of(num_correct: int, num_samples: int, n: int) -> float:
    if num_samples <= n:
        return float(num_correct > 0)
    return 1 - comb(num_samples - num_correct, n) / comb(num_samples, n)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
