"""The rows of the embedded engine: which of them are decoded together, and what is kept of those that wait."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infra.engines.base import EngineUsage, Generation, GenerationRequest, Sampling, check_prompts
from infra.engines.embedded.decoding import DecodingBatch, ExpertRecord, RowCache
from infra.engines.embedded.samples import TurnSamples, sample_tokens
from rl_core.scoring import RouterReplay

# A change of a batch copies its cache: rows join and leave once they are this fraction of it.
_CHANGE_FRACTION = 1 / 8


@dataclass(frozen=True, eq=False)
class _Start:
    """Rows that wait for a place: of one prompt, or a single one that is continued."""

    rows: tuple[int, ...]
    seeds: tuple[int, ...]
    limit: int  # the most tokens that each samples
    stop: tuple[str, ...]  # strings that end it, besides the sampling's
    token_ids: np.ndarray  # all tokens before that


@dataclass(frozen=True, eq=False)
class _Path:
    """Tokens of a row whose cache is kept outside of any batch."""

    row: int
    token_ids: np.ndarray  # the last one of which has not been run
    cache: RowCache

    @property
    def num_cached(self) -> int:
        """The tokens in the cache."""
        return _num_cached(self.cache)

    def num_common(self, token_ids: np.ndarray) -> int:
        """Return how many of its tokens others begin with."""
        size = min(len(self.token_ids), len(token_ids))
        differs = self.token_ids[:size] != token_ids[:size]
        return int(differs.argmax()) if differs.any() else size


class _Beginning(NamedTuple):
    """The cache of tokens that the next turn of a row begins with."""

    cache: RowCache | None = None  # None: of none
    is_whole: bool = False  # whether the turn continues a path from its end


class TransformersRows:
    """`DecodingRows` of a transformers model.

    Rows that join are prefilled as a batch of their own, which then merges with the others. The cache of a row whose
    turn has ended is kept aside when it leaves its batch, as long as there is room, and so are those of paths that the
    row has left by a branch; a turn computes what follows the longest beginning that is kept.

    Args:
        model: The model.
        sampling: How tokens are sampled.
        tokenizer: Its tokenizer; needed for stop strings only.
        replay: Records experts; None: they are not recorded.
        usage: How much of the engine is in use.
        max_cache_tokens: Tokens of the KV cache, at least one row of the longest length.
        several_turns: Whether rows are extended.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase | None,
        replay: RouterReplay | None,
        usage: EngineUsage,
        max_cache_tokens: int,
        *,
        several_turns: bool,
    ) -> None:
        self._model, self._sampling, self._replay, self._usage = model, sampling, replay, usage
        self._max_cache_tokens, self._several_turns = max_cache_tokens, several_turns
        self._samples = TurnSamples(sampling, tokenizer)
        self._histories: dict[int, np.ndarray] = {}  # of rows that are not forgotten: all tokens before their turn
        self._waiting: list[_Start] = []
        self._batches: list[DecodingBatch] = []
        self._ended_at: dict[int, int] = {}  # the width of its batch when a row's turn ended, until it leaves
        self._held: dict[int, _Path] = {}  # of rows that have left their batch
        self._left: list[_Path] = []  # that rows have left by branches, the oldest first

    @property
    def num_unfinished(self) -> int:
        return self._num_waiting + int((~self._samples.ended).sum())

    def begin(self, requests: Sequence[GenerationRequest]) -> range:
        check_prompts(requests, self._sampling)
        added = self._samples.add(sum(request.num_samples for request in requests))
        numbers = iter(added)
        for request in requests:
            if rows := tuple(next(numbers) for _ in request.seeds):
                prompt_ids, limit = np.asarray(request.prompt_ids), request.token_limit(self._sampling)
                self._waiting.append(_Start(rows, request.seeds, limit, request.stop, prompt_ids))
        return added

    def extend(self, row: int, token_ids: np.ndarray, seed: int, max_tokens: int, stop: tuple[str, ...] = ()) -> None:
        assert self._several_turns, "rows are extended only if they were opened so"
        history = np.concatenate([self._tokens_of(row), token_ids])
        self._waiting.append(_Start((row,), (seed,), max_tokens, stop, history))

    def branch(self, row: int, request: GenerationRequest) -> int:
        assert self._several_turns, "rows branch only if they were opened so"
        check_prompts([request], self._sampling)
        limit = request.token_limit(self._sampling)
        self._waiting.append(_Start((row,), request.seeds, limit, request.stop, np.asarray(request.prompt_ids)))
        return row

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Generation]]:
        self._remove_ended()
        starts = self._admitted()
        decoded = [(batch, batch.advance(int(self._samples.counts[batch.rows].max()))) for batch in self._batches]
        decoded += (added := self._prefill(starts))
        running = int((~self._samples.ended).sum())
        found: list[tuple[int, Generation]] = []
        for batch, logits in decoded:
            noise = torch.from_numpy(self._samples.noise(batch.rows)).to(logits.device)
            batch.newest, logprobs, mask = sample_tokens(logits, noise, self._sampling)
            ended = self._samples.record(batch.rows, batch.newest.cpu().numpy(), logprobs.cpu().numpy(), mask)
            self._ended_at.update(dict.fromkeys(ended, batch.width))
            found += [(row, self._generation(row, batch)) for row in ended]
        for batch, _ in added:
            self._add_batch(batch)
        num_cached = sum(len(batch.rows) * batch.width for batch in self._batches) + self._num_held
        self._usage.add(running, self._num_waiting, num_cached / self._max_cache_tokens)
        return found

    def end(self, row: int) -> None:
        del self._histories[row]
        self._held.pop(row, None)
        self._left = [path for path in self._left if path.row != row]

    def close(self) -> None:
        for entries in (self._histories, self._waiting, self._batches, self._ended_at, self._held, self._left):
            entries.clear()

    @property
    def _num_waiting(self) -> int:
        return sum(len(start.rows) for start in self._waiting)

    @property
    def _num_held(self) -> int:
        """The cached tokens outside of any batch."""
        return sum(path.num_cached for path in (*self._held.values(), *self._left))

    def _tokens_of(self, row: int) -> np.ndarray:
        """Return all tokens of a row whose turn has ended."""
        return np.concatenate([self._histories[row], self._samples.of_row(row)[0]])

    def _remove_ended(self) -> None:
        """Remove rows whose turn has ended from batches of which they are a large enough fraction, or must be."""
        returning = {row for start in self._waiting for row in start.rows} & self._ended_at.keys()
        for batch in list(self._batches):
            goes_on = ~self._samples.ended[batch.rows]
            num_ended = len(batch.rows) - int(goes_on.sum())
            if num_ended >= max(1, _CHANGE_FRACTION * len(batch.rows)) or not returning.isdisjoint(batch.rows):
                self._remove(batch, goes_on)

    def _remove(self, batch: DecodingBatch, goes_on: np.ndarray) -> None:
        for row in batch.rows[~goes_on].tolist():
            width = self._ended_at.pop(row)
            if self._several_turns and row in self._histories and batch.can_move_rows:
                self._held[row] = _Path(row, self._tokens_of(row), batch.take(row, width))
        if goes_on.any():
            batch.keep(goes_on)
        else:
            self._batches.remove(batch)

    def _admitted(self) -> list[tuple[_Start, _Beginning]]:
        """Return the next of the rows that wait, as many as have room next to those that are decoded."""
        running = np.flatnonzero(~self._samples.ended)
        if not self._waiting or (
            len(running) and (not self._several_turns or self._num_waiting < _CHANGE_FRACTION * len(running))
        ):
            return []
        longest = max((len(self._histories[row]) + self._samples.limits[row] for row in running), default=0)
        num_rows, taken = len(running), 0
        for start in self._waiting:
            length = max(longest, len(start.token_ids) + start.limit)
            if num_rows and (num_rows + len(start.rows)) * length > self._max_cache_tokens:
                break
            num_rows, longest, taken = num_rows + len(start.rows), length, taken + 1
        starts, self._waiting = self._waiting[:taken], self._waiting[taken:]
        admitted = [(start, self._take_beginning(start)) for start in starts]
        self._make_room(num_rows * longest)
        return admitted

    def _take_beginning(self, start: _Start) -> _Beginning:
        """Return the longest kept beginning of a row's next turn; a path that it continues is kept no longer."""
        row = start.rows[0]
        if row in self._held:
            self._left.append(self._held.pop(row))
        found = [(path.num_common(start.token_ids), path) for path in self._left if path.row == row]
        if not found:
            return _Beginning()
        num_common, path = max(found, key=lambda each: (each[0], -each[1].num_cached))
        if is_whole := num_common == len(path.token_ids):
            self._left.remove(path)
        size = min(num_common, path.num_cached, len(start.token_ids) - 1)  # the logits after its last token are needed
        if size == 0:
            return _Beginning()
        return _Beginning([(keys[:, :size], values[:, :size]) for keys, values in path.cache], is_whole)

    def _make_room(self, num_tokens: int) -> None:
        """Drop what is kept, the paths that were left first, until `num_tokens` next to it fit into the cache."""
        kept = self._num_held
        while kept and num_tokens + kept > self._max_cache_tokens:
            path = self._left.pop(0) if self._left else self._held.pop(next(iter(self._held)))
            kept -= path.num_cached

    def _prefill(self, starts: Sequence[tuple[_Start, _Beginning]]) -> list[tuple[DecodingBatch, torch.Tensor]]:
        """Start the turns of rows, and return their batches with their first logits."""
        prefilled = []
        # Apart: they get a few tokens only, those after a common beginning, or all.
        for is_held, is_whole in ((True, True), (True, False), (False, False)):
            group = [
                (start, cache)
                for start, (cache, from_end) in starts
                if (cache is not None, from_end) == (is_held, is_whole)
            ]
            if not group:
                continue
            rows = [row for start, _ in group for row in start.rows]
            limits = [start.limit for start, _ in group for _ in start.rows]
            stops = [start.stop for start, _ in group for _ in start.rows]
            self._samples.start(rows, [seed for start, _ in group for seed in start.seeds], limits, stops)
            self._histories |= {row: start.token_ids for start, _ in group for row in start.rows}
            held = [cache for _, cache in group if cache is not None]
            token_ids = [start.token_ids[0 if cache is None else _num_cached(cache) :] for start, cache in group]
            # A path's last sampled token has not been run: it is not computed a second time.
            self._usage.prefilled += sum(map(len, token_ids)) - (len(group) if is_whole else 0)
            experts = ExpertRecord(self._replay, len(rows), max(limits)) if self._replay else None
            batch = DecodingBatch(self._model, experts)
            prefilled.append((batch, batch.prefill([start.rows for start, _ in group], token_ids, held or None)))
        return prefilled

    def _add_batch(self, added: DecodingBatch) -> None:
        if not (self._batches and added.can_move_rows):
            self._batches.append(added)
            return
        batch, width = self._batches[0], self._batches[0].width
        own, others = batch.rows.tolist(), added.rows.tolist()
        batch.merge(added)
        for rows, before in ((own, width), (others, added.width)):
            for row in rows:
                if row in self._ended_at:
                    self._ended_at[row] += batch.width - before

    def _generation(self, row: int, batch: DecodingBatch) -> Generation:
        token_ids, logprobs, reason = self._samples.of_row(row)
        experts, mask = batch.experts_of(row, len(token_ids)), self._samples.take_mask(row)
        return Generation(token_ids, logprobs, reason, experts=experts, sampling_mask=mask)


def _num_cached(cache: RowCache) -> int:
    return cache[0][0].shape[1]
