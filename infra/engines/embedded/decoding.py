"""Rows that are decoded together by a transformers model. L rows, W columns of their KV cache, V tokens of vocabulary.

Rows are left-padded to the width of the batch. Where rows get unequal numbers of tokens at once, as they are
continued, columns between them stay empty, too. Positions and masks count present tokens only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from infra.engines.base import TokenExperts
from infra.engines.embedded.cache import PreallocatedLayer, cache_argument, can_move_rows, decoding_cache
from rl_core.scoring import RouterReplay

RowCache = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: a row's keys and values [heads, T, dim]
_GROWTH_TOKENS = 64  # `present` grows by this much


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


class DecodingBatch:
    """L rows with a common KV cache.

    Attributes:
        rows: int64 [L], the rows' numbers.
        newest: int64 [L], their newest tokens, which have not been run.
        width: W, the columns of the cache; its last one is of the newest tokens that have been run.
    """

    rows: np.ndarray
    newest: torch.Tensor

    def __init__(self, model: PreTrainedModel, experts: ExpertRecord | None = None) -> None:
        """Make a batch without rows; `prefill` adds them.

        Args:
            model: The model, with `PreallocatedLayer`s in its caches where its attention is full.
            experts: Records what its experts are.
        """
        self._model, self._experts = model, experts
        self._cache, self._cache_argument = decoding_cache(model.config), cache_argument(model)
        self.width = 0

    @property
    def can_move_rows(self) -> bool:
        """Whether rows can be taken out, continued later, and join other batches."""
        return can_move_rows(self._cache)

    def prefill(
        self, rows: Sequence[Sequence[int]], token_ids: Sequence[np.ndarray], held: Sequence[RowCache] | None
    ) -> torch.Tensor:
        """Run S sequences, each for one or more rows, and return every row's last logits [L, V].

        Args:
            rows: S, the numbers of the rows that continue each sequence.
            token_ids: S, integers [Q], Q >= 1: what follows the held tokens.
            held: S, what `take` returned of each; None: there are none.
        """
        device = self._model.device
        cached = np.array([states[0][0].shape[1] for states in held] if held else [0] * len(rows))
        lengths = np.array([len(ids) for ids in token_ids])
        start, width = int(cached.max()), int(lengths.max())
        if held:
            self._hold(held, start)
        input_ids = np.zeros((len(rows), width), dtype=np.int64)
        for index, ids in enumerate(token_ids):
            input_ids[index, width - lengths[index] :] = ids
        present = np.concatenate(
            [np.arange(start) >= (start - cached)[:, None], np.arange(width) >= (width - lengths)[:, None]], axis=1
        )
        positions = cached[:, None] + np.maximum(np.arange(width) - (width - lengths)[:, None], 0)
        self._present, self._is_padded = torch.from_numpy(present).to(device), not present.all()
        self.width = start
        with self._experts.prefill(lengths) if self._experts else nullcontext():
            logits = self._forward(torch.from_numpy(input_ids).to(device), torch.from_numpy(positions).to(device))
        self.rows = np.array([row for each in rows for row in each])
        self._first = int(self.rows[0])
        self._sequence_of = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
        repeated = torch.from_numpy(self._sequence_of).to(device)
        self._next_positions = torch.from_numpy(cached + lengths).to(device)[repeated, None]
        if len(self.rows) == len(rows):
            return logits
        self._present = self._present[repeated]
        self._cache.reorder_cache(repeated)  # type: ignore[arg-type]  # it is of int64
        return logits[repeated]

    def advance(self, num_sampled: int) -> torch.Tensor:
        """Run the newest tokens, and return the logits after them [L, V].

        Args:
            num_sampled: The tokens that the rows have sampled, if experts are recorded.
        """
        with self._experts.decode(self.rows - self._first, num_sampled - 1) if self._experts else nullcontext():
            logits = self._forward(self.newest[:, None], self._next_positions)
        self._next_positions = self._next_positions + 1
        return logits

    def keep(self, kept: np.ndarray) -> None:
        """Remove all rows but those at `kept`, bool [L]."""
        indices = torch.from_numpy(np.flatnonzero(kept)).to(self.newest.device)
        self._cache.reorder_cache(indices)  # type: ignore[arg-type]  # it is of int64
        self._present, self._next_positions = self._present[indices], self._next_positions[indices]
        self.newest, self.rows = self.newest[indices], self.rows[kept]

    def take(self, row: int, width: int) -> RowCache:
        """Return what a row's tokens have left in the first `width` columns of the cache."""
        index = int(np.flatnonzero(self.rows == row)[0])
        columns = self._present[index, :width].nonzero()[:, 0]
        return [layer.take(index, columns) for layer in self._layers()]

    def merge(self, other: "DecodingBatch") -> None:
        """Add the rows of a batch, which can't be used afterwards; both must be able to move rows."""
        batches = (self, other)
        used = [batch.width - int(batch._present[:, : batch.width].any(0).int().argmax()) for batch in batches]
        width = max(used)
        for layer, *parts in zip(self._layers(), *(batch._layers() for batch in batches), strict=True):
            layer.fill(
                *(
                    torch.cat([_right_aligned(states, width) for states in pair])
                    for pair in zip(*((part.keys, part.values) for part in parts), strict=True)
                )
            )
        self._present = torch.cat([_right_aligned(batch._present[:, : batch.width], width, 1) for batch in batches])
        self._is_padded = not bool(self._present.all())
        self._next_positions = torch.cat([batch._next_positions for batch in batches])
        self.newest = torch.cat([batch.newest for batch in batches])
        self.rows = np.concatenate([batch.rows for batch in batches])
        self.width = width

    def experts_of(self, row: int, length: int) -> TokenExperts | None:
        """Return the experts of a row that has sampled `length` tokens; None if they are not recorded."""
        if self._experts is None:
            return None
        index = row - self._first
        return self._experts.of_row(index, int(self._sequence_of[index]), length)

    def _hold(self, held: Sequence[RowCache], width: int) -> None:
        for number, layer in enumerate(self._layers()):
            layer.fill(
                *(
                    torch.stack(
                        [
                            pad(states[number][which], (0, 0, width - states[number][which].shape[1], 0))
                            for states in held
                        ]
                    )
                    for which in (0, 1)
                )
            )

    def _layers(self) -> list[PreallocatedLayer]:
        return [layer for layer in self._cache.layers if isinstance(layer, PreallocatedLayer)]

    def _forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Run `input_ids` [L, T], which follow the cached tokens; return the last logits [L, V]."""
        self.width += input_ids.shape[1]
        if self.width > self._present.shape[1]:
            self._present = pad(self._present, (0, self.width + _GROWTH_TOKENS - self._present.shape[1]), value=True)
        output = self._model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=self._present[:, : self.width] if self._is_padded else None,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def _right_aligned(states: torch.Tensor, width: int, dim: int = 2) -> torch.Tensor:
    """Cut or zero-pad the left of `states` along a dimension."""
    missing = width - states.shape[dim]
    if missing <= 0:
        return states.narrow(dim, -missing, width)
    shape = list(states.shape)
    shape[dim] = missing
    return torch.cat([states.new_zeros(shape), states], dim)
