"""The rows of a vLLM engine: each turn is a request of its own, whose history is in vLLM's prefix cache."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from infra.engines.base import Generation, GenerationRequest, Sampling
from infra.engines.checks import check_prompts
from infra.engines.vllm.translate import generation, vllm_params

if TYPE_CHECKING:
    from infra.engines.vllm.engine import VllmEngine


class VllmRows:
    """`DecodingRows` of a vLLM engine; a turn computes at most a block of its row's history again.

    Args:
        engine: The engine.
        sampling: How tokens are sampled.
        max_tokens: The most tokens of a row.
    """

    def __init__(self, engine: "VllmEngine", sampling: Sampling, max_tokens: int) -> None:
        self._engine, self._sampling, self._max_tokens = engine, sampling, max_tokens
        self._histories: dict[int, np.ndarray] = {}  # of rows that are not forgotten: all their tokens so far
        self._pending: dict[int, str] = {}  # vLLM's request ids of the rows whose turn has not ended
        self._num_begun = 0

    @property
    def num_unfinished(self) -> int:
        """The number of rows whose turn has not ended."""
        return len(self._pending)

    def begin(self, requests: Sequence[GenerationRequest]) -> range:
        """Add a row per sample; see `DecodingRows.begin`."""
        check_prompts(requests, self._sampling, self._max_tokens)
        first = self._num_begun
        for request in requests:
            for seed in request.seeds:
                self._histories[self._num_begun] = np.asarray(request.prompt_ids)
                self._add(self._num_begun, seed, request.token_limit(self._sampling))
                self._num_begun += 1
        return range(first, self._num_begun)

    def extend(self, row: int, token_ids: np.ndarray, seed: int, max_tokens: int) -> None:
        """Add the next turn of a row whose turn has ended; see `DecodingRows.extend`."""
        history = np.concatenate([self._histories[row], token_ids])
        check_prompts([GenerationRequest(history, (seed,), max_tokens)], self._sampling, self._max_tokens)
        self._histories[row] = history
        self._add(row, seed, max_tokens)

    def step(self) -> list[tuple[int, Generation]]:
        """Run one forward pass of the rows that vLLM schedules; see `DecodingRows.step`."""
        found = []
        for output in self._engine.step():
            row, sampled = int(output.request_id), generation(output.outputs[0])
            del self._pending[row]
            self._engine.usage.prefilled += len(self._histories[row]) - (output.num_cached_tokens or 0)
            self._histories[row] = np.concatenate([self._histories[row], sampled.token_ids])
            found.append((row, sampled))
        return found

    def end(self, row: int) -> None:
        """Forget a row whose turn has ended."""
        del self._histories[row]

    def close(self) -> None:
        """Forget all rows, and abort those whose turn has not ended."""
        self._engine.abort(list(self._pending.values()))
        self._pending.clear()
        self._histories.clear()

    def _add(self, row: int, seed: int, max_tokens: int) -> None:
        params = vllm_params(self._sampling, seed, max_tokens)
        self._pending[row] = self._engine.add_request(str(row), self._histories[row].tolist(), params)
