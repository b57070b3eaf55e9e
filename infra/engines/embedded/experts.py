"""The experts that the embedded engine's model chooses for each token: C, in all layers together."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from infra.engines.base import TokenExperts
from rl_core.scoring import RouterReplay


class ExpertRecord:
    """The experts of the tokens of one batch of N rows.

    Args:
        replay: Records the model's forwards.
        num_rows: N.
        max_response_tokens: Of one row.
    """

    def __init__(self, replay: RouterReplay, num_rows: int, max_response_tokens: int) -> None:
        self._replay = replay
        self._responses = np.zeros((num_rows, max_response_tokens, replay.width), dtype=replay.dtype)
        self._prompts: list[np.ndarray[Any, Any]] = []

    @contextmanager
    def prefill(self, lengths: np.ndarray[Any, Any]) -> Iterator[None]:
        """Record the forward of the left-padded prompts of all requests, which have these lengths in tokens."""
        with self._replay.recording() as chosen:
            yield
        rows = self._to_numpy(chosen[0]).reshape(len(lengths), -1, self._replay.width)
        self._prompts = [row[len(row) - length :].copy() for row, length in zip(rows, lengths.tolist(), strict=True)]

    @contextmanager
    def decode(self, rows: np.ndarray[Any, Any], position: int) -> Iterator[None]:
        """Record the forward of one token of each of these rows, at this position of their responses."""
        with self._replay.recording() as chosen:
            yield
        self._responses[rows, position] = self._to_numpy(chosen[0])

    def of_row(self, row: int, request: int, length: int) -> TokenExperts:
        """Return the experts of a row that has ended with `length` tokens, and of its request's prompt."""
        prompt, response = self._prompts[request], self._responses[row, :length].copy()
        response[-1] = prompt[-1]  # the last token has not been run, or only because other rows have not ended
        return TokenExperts(prompt, response)

    def _to_numpy(self, experts: Tensor) -> np.ndarray[Any, Any]:
        return experts.cpu().numpy().astype(self._replay.dtype)
