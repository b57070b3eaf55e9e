"""The question to a judge, and the score in its answer."""

import re

from schemas.config.judge import JudgedReward

EXCERPT_CHARACTERS = 200


class Rubric:
    """Asks what a config asks, and reads the score as it says.

    Args:
        config: The judge.
    """

    def __init__(self, config: JudgedReward) -> None:
        self._config, self._pattern = config, re.compile(config.pattern, re.DOTALL)

    def question(self, prompt: str, completion: str, answer: str) -> str:
        """Return the question about a response."""
        return self._config.prompt.format(prompt=prompt, response=completion, answer=answer)

    def score(self, text: str) -> float:
        """Return the score in a judge's answer, divided by `scale`.

        Raises:
            ValueError: It has no score from 0 to `scale`.
        """
        found = list(self._pattern.finditer(text))
        if not found:
            raise ValueError(f"the judge's answer has no score, as reward.pattern finds it: {_end_of(text)}")
        try:
            score = float(found[-1][1])
        except (TypeError, ValueError):
            raise ValueError(f"the judge's score is {found[-1][1]!r:.80}, not a number: {_end_of(text)}") from None
        if not 0 <= score <= self._config.scale:
            scale = self._config.scale
            raise ValueError(f"the judge's score {score:g} is not from 0 to reward.scale = {scale:g}: {_end_of(text)}")
        return score / self._config.scale


def _end_of(text: str) -> str:
    """Return the end of an answer, where its score is."""
    return repr(text.strip()[-EXCERPT_CHARACTERS:])
