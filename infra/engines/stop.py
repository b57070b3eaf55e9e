"""Stop strings: find the token of a response that completes the first of them. N rows."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoded from bytes that are not a character, or not yet a whole one
_MAX_INCOMPLETE = 3  # bytes of an incomplete UTF-8 character; a whole one has at most four


class StopStrings:
    """Looks for stop strings in N responses that grow by one token at a time.

    Responses are decoded without special tokens, as vLLM does by default. Of each response, only a window of the last
    tokens is decoded. It begins at least the longest stop string's length before the newest token, and never within a
    character, since a tokenizer's byte tokens only decode correctly together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], num_rows: int) -> None:
        """Look for `strings`, none of them empty, in responses that are still empty."""
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._max_length = max(len(string) for string in strings)
        self._starts = np.zeros(num_rows, dtype=np.int64)  # the first token of each row's window
        self._next_starts = np.zeros(num_rows, dtype=np.int64)  # and of its next window; follows a whole character
        self._num_before = np.zeros(num_rows, dtype=np.int64)  # characters of the window before the next one's start

    def find(self, rows: np.ndarray, token_ids: np.ndarray, num_tokens: int) -> np.ndarray:
        """Return bool [L]: whether the newest token of each row has completed a stop string.

        Args:
            rows: int64 [L], L >= 1, the rows that have grown by one token.
            token_ids: Integers [N, R], all rows' responses.
            num_tokens: The number of tokens that these rows have now, at most R.
        """
        windows = [token_ids[row, self._starts[row] : num_tokens].tolist() for row in rows]
        decoded = self._tokenizer.batch_decode(windows, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for row, text in zip(rows, decoded, strict=True):
            self._move_window(row, text, num_tokens)
        return np.array([any(string in text for string in self._strings) for text in decoded], dtype=bool)

    def _move_window(self, row: int, text: str, num_tokens: int) -> None:
        """Move on to the next window once that contains whatever could still become a stop string."""
        num_unfinished = len(text) - len(text.rstrip(_REPLACEMENT))
        num_after = len(text) - self._num_before[row]
        if 0 < num_unfinished <= _MAX_INCOMPLETE or num_after < self._max_length:
            return
        self._starts[row], self._next_starts[row] = self._next_starts[row], num_tokens
        self._num_before[row] = num_after
