"""What rows have sampled in their turns. N rows, M the most tokens of a turn, L rows that are decoded together."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from infra.engines.base import Sampling
from infra.engines.embedded.stop import StopStrings
from rl_core.rollout.seeding import uniforms
from schemas.rollout import FinishReason


class TurnSamples:
    """The tokens of each row's current turn, and where it ends.

    Attributes:
        counts: int64 [N], the tokens that each row has sampled in its turn.
        limits: int64 [N], the most of them.
        ended: bool [N], whether its turn has ended, or has not begun.
    """

    def __init__(self, sampling: Sampling, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._max_tokens = sampling.max_response_tokens
        self._stop_ids = np.array(sampling.stop_token_ids, dtype=np.int64)
        self._stop_strings = StopStrings(tokenizer, sampling.stop) if tokenizer and sampling.stop else None
        self.counts = self.limits = np.zeros(0, dtype=np.int64)
        self.ended = np.zeros(0, dtype=bool)
        self._noise = np.zeros((0, self._max_tokens), dtype=np.float64)
        self._token_ids = np.zeros((0, self._max_tokens), dtype=np.int32)
        self._logprobs = np.zeros((0, self._max_tokens), dtype=np.float32)
        self._reasons: list[FinishReason] = []

    def add(self, num_rows: int) -> range:
        """Add rows whose turns have not begun; return their numbers."""
        first = len(self.counts)
        self.counts, self.limits = (np.pad(array, (0, num_rows)) for array in (self.counts, self.limits))
        self.ended = np.pad(self.ended, (0, num_rows), constant_values=True)
        more = (0, num_rows), (0, 0)
        self._noise, self._token_ids = np.pad(self._noise, more), np.pad(self._token_ids, more)
        self._logprobs = np.pad(self._logprobs, more)
        self._reasons += ["length"] * num_rows
        return range(first, first + num_rows)

    def start(self, rows: Sequence[int], seeds: Sequence[int], limits: Sequence[int]) -> None:
        """Begin the next turns of rows."""
        chosen, longest = np.array(rows), max(limits)
        self._noise[chosen, :longest] = uniforms(np.array(seeds, dtype=np.uint64), longest)
        self.limits[chosen], self.counts[chosen], self.ended[chosen] = limits, 0, False
        if self._stop_strings is not None:
            self._stop_strings.restart(rows)

    def noise(self, rows: np.ndarray, num_tokens: int) -> np.ndarray:
        """Return the uniforms of the next K tokens: float64 [L, K]; any for those after the end of a turn."""
        positions = self.counts[rows, None] + np.arange(num_tokens)
        return self._noise[rows[:, None], np.minimum(positions, self._max_tokens - 1)]

    def so_far(self, row: int) -> np.ndarray:
        """Return the tokens of a row's turn: int32 [R]."""
        return self._token_ids[row, : self.counts[row]]

    def record(
        self, rows: np.ndarray, token_ids: np.ndarray, logprobs: np.ndarray, drafts: np.ndarray
    ) -> tuple[list[int], np.ndarray]:
        """Add K tokens to each of these rows, up to the first that is not its draft or ends its turn.

        Args:
            rows: int64 [L].
            token_ids: Integers [L, K]: each was sampled after the row's drafts before it.
            logprobs: float32 [L, K].
            drafts: Integers [L, K - 1].

        Returns:
            The rows whose turn ends, and how many tokens each row got: int64 [L], 0 if its turn had ended before.
        """
        before, follows, found = self.counts[rows], np.ones(len(rows), dtype=bool), list[int]()
        for position in range(token_ids.shape[1]):
            follows &= ~self.ended[rows]
            found += self._record(rows[follows], token_ids[follows, position], logprobs[follows, position])
            if position < drafts.shape[1]:
                follows &= token_ids[:, position] == drafts[:, position]
        return found, self.counts[rows] - before

    def _record(self, rows: np.ndarray, token_ids: np.ndarray, logprobs: np.ndarray) -> list[int]:
        """Add a token to each of these rows; return those whose turn ends with it."""
        positions = self.counts[rows]
        self._token_ids[rows, positions] = token_ids
        self._logprobs[rows, positions] = logprobs
        self.counts[rows] = positions + 1
        stops = np.isin(token_ids, self._stop_ids)
        if self._stop_strings is not None and len(rows):
            stops |= self._stop_strings.find(rows, self._token_ids, self.counts[rows])
        ended = stops | (self.counts[rows] == self.limits[rows])
        for row, stopped in zip(rows[ended].tolist(), stops[ended].tolist(), strict=True):
            self._reasons[row] = "stop" if stopped else "length"
        self.ended[rows[ended]] = True
        found: list[int] = rows[ended].tolist()
        return found

    def of_row(self, row: int) -> tuple[np.ndarray, np.ndarray, FinishReason]:
        """Return what a row has sampled: int32 [R], float32 [R]; and why its turn has ended."""
        length = self.counts[row]
        return self._token_ids[row, :length].copy(), self._logprobs[row, :length].copy(), self._reasons[row]
