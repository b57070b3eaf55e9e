"""Scores of rows that several ranks computed."""

import numpy as np

from schemas.step import ScoreResult
from tasks.logprob import _by_row


def test_the_kl_of_rows_is_in_the_order_of_the_batch() -> None:
    rows = np.array([1, 2, 4, 0, 3])  # of two ranks, ascending in each; not its own inverse
    results = [ScoreResult(put=None, row_kl=(0.1, 0.2, 0.4)), ScoreResult(put=None, row_kl=(0.0, 0.3))]
    assert _by_row(rows, results) == (0.0, 0.1, 0.2, 0.3, 0.4)


def test_without_a_kl_term_rows_have_none() -> None:
    assert _by_row(np.array([1, 0]), [ScoreResult(put=None), ScoreResult(put=None)]) is None
