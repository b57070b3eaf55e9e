"""Drafts of a row's next tokens: what followed, earlier, the tokens that it ends with. No model is needed.

Saxena 2023 (prompt lookup decoding); the other samples of the prompt are searched as well, as they often say the same.
"""

from collections.abc import Sequence

import numpy as np

_GAP = -1  # between the tokens of two rows


def draft(own: np.ndarray, others: Sequence[np.ndarray], ngram: int, num_tokens: int) -> np.ndarray:
    """Return the tokens that followed the longest earlier occurrence of a row's last tokens, the newest of several.

    Args:
        own: Integers [T], T >= 1, the row's tokens so far.
        others: The tokens of other rows.
        ngram: The most last tokens that are looked for.
        num_tokens: The most tokens to return.

    Returns:
        Integers [K], K <= `num_tokens`; none if the last token is new.

    Example:
        >>> draft(np.array([1, 2, 3, 4, 1, 2]), [], ngram=3, num_tokens=2).tolist()
        [3, 4]
        >>> draft(np.array([5, 1, 2]), [np.array([7, 2, 8]), np.array([1, 2, 9])], ngram=3, num_tokens=2).tolist()
        [9]
    """
    text = np.concatenate([part for other in others for part in (other, [_GAP])] + [own]).astype(np.int64)
    ends = np.flatnonzero((text[:-1] == text[-1]) & (text[1:] != _GAP))
    for back in range(1, min(ngram, len(own))):
        longer = ends[(ends >= back) & (text[ends - back] == text[-1 - back])]
        if not len(longer):
            break
        ends = longer
    if not len(ends):
        return text[:0]
    found = text[ends[-1] + 1 : ends[-1] + 1 + num_tokens]
    gaps = np.flatnonzero(found == _GAP)
    return found[: gaps[0]] if len(gaps) else found


def stack_drafts(drafts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the drafts of L rows as int64 [L, K], with -1 after those of a row that has fewer."""
    stacked = np.full((len(drafts), max(map(len, drafts), default=0)), _GAP)
    for row, tokens in zip(stacked, drafts, strict=True):
        row[: len(tokens)] = tokens
    return stacked
