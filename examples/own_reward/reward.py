"""The reward of an invented name: it has the requested length, is easy to say, and repeats few letters."""

from itertools import pairwise
from typing import Any

VOWELS = set("aeiou")
CONSONANTS = set("bcdfghjklmnpqrstvwxyz")


def score(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> dict[str, float]:
    """Return the reward, between 0 and 1, and its parts; `answer` is the requested number of letters."""
    wanted, actual = int(answer), len(completion)
    length = max(0.0, 1 - abs(actual - wanted) / wanted)
    sound = sum(alternates(*pair) for pair in pairwise(completion)) / max(actual - 1, 1)
    variety = len(set(completion) & (VOWELS | CONSONANTS)) / max(actual, 1)
    return {"reward": length * (1 + sound + variety) / 3, "length": length, "sound": sound, "variety": variety}


def alternates(first: str, second: str) -> bool:
    """Return whether one of two neighboring characters is a vowel and the other a consonant, as in "sa" or "an"."""
    return (first in VOWELS and second in CONSONANTS) or (first in CONSONANTS and second in VOWELS)
