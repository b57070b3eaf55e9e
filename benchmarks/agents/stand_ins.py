"""What the ways to measure are compared with: answers without a wait, and turns that compute their history again."""

from collections.abc import Collection, Sequence

import numpy as np

from benchmarks.agents.delayed import ANSWER
from infra.engines.base import DecodingRows, Generation, GenerationRequest, RolloutEngine, Sampling
from infra.environments.slot import Replies, Reply
from rl_core.environments.base import Task


class Immediate:
    """What takes the place of an `EnvironmentPool`, and answers at once."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._left: dict[int, int] = {}
        self.replies = Replies()

    def open(self, row: int, task: Task, seed: int, number: int = 0) -> None:
        """Reset a row's environment."""
        self._left[row] = self._turns
        self.replies.add(row, Reply())

    def step(self, row: int, action: str) -> None:
        """Answer a row's action."""
        self._left[row] -= 1
        self.replies.add(row, Reply(observations=(ANSWER,), done=self._left[row] == 0))

    def wait(self, rows: Collection[int] | None = None) -> dict[int, Reply]:
        """Return the replies of rows."""
        return {row: self.replies.pop(row) for row in sorted(self.replies if rows is None else rows)}

    def poll(self, *, waits: bool) -> dict[int, Reply]:
        """Return all replies."""
        return self.wait()

    def end(self, row: int) -> None:
        """Forget a row."""

    def end_all(self) -> None:
        """Forget all rows."""


class Anew:
    """`DecodingRows` whose turns are requests of their own; a row's number is that of its first one."""

    def __init__(self, rows: DecodingRows) -> None:
        self._rows = rows
        self._own: dict[int, int] = {}  # by the number of the newest request
        self._histories: dict[int, np.ndarray] = {}

    @property
    def num_unfinished(self) -> int:
        """The number of rows whose turn has not ended."""
        return self._rows.num_unfinished

    def begin(self, requests: Sequence[GenerationRequest]) -> range:
        """Add a row per sample."""
        added = self._rows.begin(requests)
        prompts = [request.prompt_ids for request in requests for _ in request.seeds]
        self._own.update({row: row for row in added})
        self._histories.update(zip(added, prompts, strict=True))
        return added

    def extend(self, row: int, token_ids: np.ndarray, seed: int, max_tokens: int) -> None:
        """Add a request of all of a row's tokens."""
        self._histories[row] = np.concatenate([self._histories[row], token_ids])
        (number,) = self._rows.begin([GenerationRequest(self._histories[row], (seed,), max_tokens)])
        self._own[number] = row

    def step(self) -> list[tuple[int, Generation]]:
        """Sample a token for each row."""
        found = []
        for number, turn in self._rows.step():
            self._rows.end(number)
            row = self._own.pop(number)
            self._histories[row] = np.concatenate([self._histories[row], turn.token_ids])
            found.append((row, turn))
        return found

    def end(self, row: int) -> None:
        """Forget a row."""

    def close(self) -> None:
        """Forget all rows."""
        self._rows.close()


class AnewEngine:
    """An engine whose rows are `Anew`."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def open_rows(self, sampling: Sampling, *, several_turns: bool = False) -> Anew:
        """Return a decoder without rows."""
        return Anew(self._engine.open_rows(sampling, several_turns=several_turns))
