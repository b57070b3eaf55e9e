"""Stop texts: which token of a response completes the first of them. N rows."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are no character, or not yet
_MAX_INCOMPLETE = 3  # bytes of a character, of at most four, whose last one is still to come


class StopStrings:
    """Looks for stop texts in N responses that grow by one token at a time.

    Responses are decoded without special tokens, as vLLM does by default. Of each, only a window of the last
    tokens is decoded: it begins at least one stop text's length before the newest token, and never within a
    character, since a tokenizer's byte tokens are only right together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], num_rows: int) -> None:
        """Look for `texts`, none of them empty, in responses that have no token yet."""
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        self._longest = max(len(text) for text in texts)
        self._starts = np.zeros(num_rows, dtype=np.int64)  # the first token of each row's window
        self._next_starts = np.zeros(num_rows, dtype=np.int64)  # and of its next window, a character's end
        self._num_before = np.zeros(num_rows, dtype=np.int64)  # characters of the window before the next one

    def find(self, rows: np.ndarray, token_ids: np.ndarray, num_tokens: int) -> np.ndarray:
        """Return bool [L]: whether the newest token of each row has completed a stop text.

        Args:
            rows: int64 [L], L >= 1, the rows that have grown by a token.
            token_ids: Integers [N, R], all rows' responses.
            num_tokens: How many tokens these rows have by now, at most R.
        """
        windows = [token_ids[row, self._starts[row] : num_tokens].tolist() for row in rows]
        decoded = self._tokenizer.batch_decode(windows, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for row, text in zip(rows, decoded, strict=True):
            self._move_window(row, text, num_tokens)
        return np.array([any(stop in text for stop in self._texts) for text in decoded], dtype=bool)

    def _move_window(self, row: int, text: str, num_tokens: int) -> None:
        """Let the window begin where the next one does, once that holds whatever could still become a stop text."""
        num_unfinished = len(text) - len(text.rstrip(_REPLACEMENT))
        num_after = len(text) - self._num_before[row]
        if 0 < num_unfinished <= _MAX_INCOMPLETE or num_after < self._longest:
            return
        self._starts[row], self._next_starts[row] = self._next_starts[row], num_tokens
        self._num_before[row] = num_after
