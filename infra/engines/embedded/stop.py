"""Stop strings: find the token of a response that completes the first of them. N rows."""

from collections.abc import Iterable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl_core.rollout.decoding import decode_texts

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoded from bytes that are not a character, or not yet a whole one
_MAX_INCOMPLETE = 3  # bytes of an incomplete UTF-8 character; a whole one has at most four


class StopStrings:
    """Looks for stop strings in responses, one per row, that grow by one token at a time.

    Responses are decoded without special tokens, as vLLM does by default. Of each response, only a window of the last
    tokens is decoded. It begins at least the longest stop string's length before the newest token, and never within a
    character, since a tokenizer's byte tokens only decode correctly together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        """Look for `strings`, none of them empty, in the responses of the rows that `restart` names."""
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._max_length = max(len(string) for string in strings)
        self._starts: dict[int, int] = {}  # the first token of each row's window
        self._next_starts: dict[int, int] = {}  # and of its next window; follows a whole character
        self._num_before: dict[int, int] = {}  # characters of the window before the next one's start

    def restart(self, rows: Iterable[int]) -> None:
        """Look for the strings in new responses of these rows, which are still empty."""
        for row in rows:
            self._starts[row] = self._next_starts[row] = self._num_before[row] = 0

    def find(self, rows: np.ndarray, token_ids: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Return bool [L]: whether the newest token of each row has completed a stop string.

        Args:
            rows: int64 [L], L >= 1, the rows that have grown by one token.
            token_ids: Integers [N, R], all N rows' responses.
            num_tokens: int64 [L], the tokens that these rows have now, at most R.
        """
        lengths = list(zip(rows.tolist(), num_tokens.tolist(), strict=True))
        windows = [token_ids[row, self._starts[row] : length].tolist() for row, length in lengths]
        decoded = decode_texts(self._tokenizer, windows, skip_special_tokens=True)
        for (row, length), text in zip(lengths, decoded, strict=True):
            self._move_window(row, text, length)
        return np.array([any(string in text for string in self._strings) for text in decoded], dtype=bool)

    def _move_window(self, row: int, text: str, num_tokens: int) -> None:
        """Move on to the next window once that contains whatever could still become a stop string."""
        num_unfinished = len(text) - len(text.rstrip(_REPLACEMENT))
        num_after = len(text) - self._num_before[row]
        if 0 < num_unfinished <= _MAX_INCOMPLETE or num_after < self._max_length:
            return
        self._starts[row], self._next_starts[row] = self._next_starts[row], num_tokens
        self._num_before[row] = num_after
