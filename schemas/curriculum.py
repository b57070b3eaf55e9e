"""A curriculum's handles: which sources a step takes its prompts from, and how well it did on each. K sources."""

from pydantic import NonNegativeInt

from schemas.base import Frozen


class SourceSchedule(Frozen):
    """How often a step takes a prompt from each source, and where each source stands before the step."""

    shares: tuple[NonNegativeInt, ...]  # K, in millionths of the step's prompts; their sum is 1,000,000
    credits: tuple[int, ...]  # K, in millionths of a prompt: what earlier steps owe each source; their sum is 0
    positions: tuple[NonNegativeInt, ...]  # K, the number of prompts that earlier steps took from each source


class SourceResults(Frozen):
    """A step's schedule, and how many of its samples were successes; groups that it dropped are counted."""

    schedule: SourceSchedule
    num_scored: tuple[NonNegativeInt, ...]  # K, samples whose reward did not fail
    num_successes: tuple[NonNegativeInt, ...]  # K, those of them whose reward reaches the threshold
