"""What rows have sampled in their turns: sampling from logits, stop strings.

N rows, V tokens of vocabulary, M the most tokens of a turn, L rows that are decoded together.
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from infra.engines.base import Sampling, SamplingMask
from rl_core.rollout.chat import decode_texts
from rl_core.rollout.seeding import uniforms
from schemas.errors import NonFiniteError
from schemas.rollout import FinishReason

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoded from bytes that are not a character, or not yet a whole one
_MAX_INCOMPLETE = 3  # bytes of an incomplete UTF-8 character; a whole one has at most four


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor, list[np.ndarray] | None]:
    """Sample one token per row by inverting its cumulative distribution at the row's uniform.

    Truncation follows vLLM's order: temperature, min-p (Nguyen et al. 2024, arXiv:2407.01082), top-k, top-p; top-p is
    relative to the probability that the others leave.

    Args:
        logits: Floating point [N, V].
        uniforms: float64 [N] in [0, 1); unused when greedy.
        sampling: Temperature (0: the most likely token), min-p, top-k and top-p.

    Returns:
        Token ids int64 [N], and their log-probs float32 [N] in nats: log-softmax(logits / temperature) before
        min-p, top-k and top-p, or over the tokens that these keep if `sampling.keeps_mask`; greedy log-probs are those
        of temperature 1. Then also the ids of these tokens, for each row; else None.

    Raises:
        NonFiniteError: A row's logits contain NaN or +inf.
    """
    logits = logits.float()
    if sampling.temperature > 0 and sampling.temperature != 1:
        logits = logits / sampling.temperature
    highest, most_likely = logits.max(dim=-1, keepdim=True)
    if not bool(highest.isfinite().all()):
        raise NonFiniteError("the model's logits are not finite; its weights have diverged")
    ratios = (logits - highest).exp_()  # to the most likely token's probability
    mask = None
    # Sums are in double precision, so that tokens in the far tail keep their part of the unit interval.
    if sampling.temperature == 0:
        tokens, totals = most_likely, ratios.sum(dim=-1, keepdim=True, dtype=torch.float64)
    elif sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1:
        totals = ratios.sum(dim=-1, keepdim=True, dtype=torch.float64)
        kept, order = _truncated(ratios, sampling)
        cumulative = kept.cumsum(dim=-1, dtype=torch.float64)
        tokens = _invert(cumulative, uniforms)
        if sampling.keeps_mask:
            totals, mask = cumulative[:, -1:], _mask_of(kept, order)
        tokens = tokens if order is None else order.gather(-1, tokens)
    else:
        cumulative = ratios.cumsum(dim=-1, dtype=torch.float64)
        totals = cumulative[:, -1:]
        tokens = _invert(cumulative, uniforms)
    logprobs = (logits.gather(-1, tokens) - highest).double() - totals.log()
    return tokens[:, 0], logprobs[:, 0].float(), mask


def _invert(cumulative: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return [N, 1], the first index at which `cumulative` [N, V] exceeds the uniform times its last value."""
    return torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)


def _truncated(ratios: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the ratios that min-p, top-k and top-p keep, others 0; the most likely token's is 1.

    They are [N, V], or [N, K] in descending order with their token ids int64 [N, K].
    """
    if sampling.min_p > 0:
        ratios = ratios * (ratios >= sampling.min_p)
    if sampling.top_k == 0 and sampling.top_p == 1:
        return ratios, None
    num_kept = min(sampling.top_k or ratios.shape[-1], ratios.shape[-1])
    ratios, order = ratios.topk(num_kept, dim=-1)
    if sampling.top_p < 1:
        cumulative = ratios.cumsum(dim=-1, dtype=torch.float64)
        # Always keeps the first, the most likely.
        ratios = ratios * (cumulative - ratios < sampling.top_p * cumulative[:, -1:])
    return ratios, order


def _mask_of(kept: torch.Tensor, order: torch.Tensor | None) -> list[np.ndarray]:
    """Return the ascending ids of the tokens that each of N rows keeps: int32."""
    rows, places = kept.nonzero(as_tuple=True)
    ids = (places if order is None else order[rows, places]).cpu().numpy().astype(np.int32)
    counts = (kept > 0).sum(-1).cpu().numpy()
    return [np.sort(each) for each in np.split(ids, np.cumsum(counts)[:-1])]


class StopStrings:
    """Looks for stop strings in responses, one per row, that grow by one token at a time.

    Responses are decoded without special tokens, as vLLM does by default. Of each response, only a window of the last
    tokens is decoded. It begins at least the longest stop string's length before the newest token, and never within a
    character, since a tokenizer's byte tokens only decode correctly together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._strings: dict[int, tuple[str, ...]] = {}  # of rows that have some
        self._starts: dict[int, int] = {}  # the first token of each row's window
        self._next_starts: dict[int, int] = {}  # and of its next window; follows a whole character
        self._num_before: dict[int, int] = {}  # characters of the window before the next one's start

    def restart(self, row: int, strings: Sequence[str]) -> None:
        """Look for strings, none of them empty, in a new response of a row, which is still empty."""
        self._strings.pop(row, None)
        if strings:
            self._strings[row] = tuple(strings)
            self._starts[row] = self._next_starts[row] = self._num_before[row] = 0

    def find(self, rows: np.ndarray, token_ids: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Return bool [L]: whether the newest token of each row has completed a stop string.

        Args:
            rows: int64 [L], the rows that have grown by one token.
            token_ids: Integers [N, R], all N rows' responses.
            num_tokens: int64 [L], the tokens that these rows have now, at most R.
        """
        found = np.zeros(len(rows), dtype=bool)
        if not self._strings:
            return found
        pairs = enumerate(zip(rows.tolist(), num_tokens.tolist(), strict=True))
        grown = [(at, row, length) for at, (row, length) in pairs if row in self._strings]
        windows = [token_ids[row, self._starts[row] : length].tolist() for _, row, length in grown]
        decoded = decode_texts(self._tokenizer, windows, skip_special_tokens=True)
        for (at, row, length), text in zip(grown, decoded, strict=True):
            self._move_window(row, text, length)
            found[at] = any(string in text for string in self._strings[row])
        return found

    def _move_window(self, row: int, text: str, num_tokens: int) -> None:
        """Move on to the next window once that contains whatever could still become a stop string."""
        num_unfinished = len(text) - len(text.rstrip(_REPLACEMENT))
        num_after = len(text) - self._num_before[row]
        if 0 < num_unfinished <= _MAX_INCOMPLETE or num_after < max(map(len, self._strings[row])):
            return
        self._starts[row], self._next_starts[row] = self._next_starts[row], num_tokens
        self._num_before[row] = num_after


class TurnSamples:
    """The tokens of each row's current turn, and where it ends.

    Attributes:
        counts: int64 [N], the tokens that each row has sampled in its turn.
        limits: int64 [N], the most of them.
        ended: bool [N], whether its turn has ended, or has not begun.
    """

    def __init__(self, sampling: Sampling, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._stop_ids = np.array(sampling.stop_token_ids, dtype=np.int64)
        self._stop, self._stop_strings = sampling.stop, StopStrings(tokenizer) if tokenizer else None
        self.counts = self.limits = np.zeros(0, dtype=np.int64)
        self.ended = np.zeros(0, dtype=bool)
        self._noise = np.zeros((0, sampling.max_response_tokens), dtype=np.float64)
        self._token_ids = np.zeros((0, sampling.max_response_tokens), dtype=np.int32)
        self._logprobs = np.zeros((0, sampling.max_response_tokens), dtype=np.float32)
        self._reasons: list[FinishReason] = []
        self._masks: dict[int, list[np.ndarray]] = {}  # of rows whose sampling keeps its mask

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

    def start(
        self, rows: Sequence[int], seeds: Sequence[int], limits: Sequence[int], stops: Sequence[tuple[str, ...]]
    ) -> None:
        """Begin the next turns of rows, each with stop strings of its own besides those of all."""
        chosen, longest = np.array(rows), max(limits)
        self._noise[chosen, :longest] = uniforms(np.array(seeds, dtype=np.uint64), longest)
        self.limits[chosen], self.counts[chosen], self.ended[chosen] = limits, 0, False
        self._masks |= {row: [] for row in rows}
        if self._stop_strings is not None:
            for row, stop in zip(rows, stops, strict=True):
                self._stop_strings.restart(row, (*self._stop, *stop))

    def noise(self, rows: np.ndarray) -> np.ndarray:
        """Return the uniforms of the next tokens: float64 [L]; any for a row whose turn has ended."""
        found: np.ndarray = self._noise[rows, np.minimum(self.counts[rows], self._noise.shape[1] - 1)]
        return found

    def record(
        self,
        rows: np.ndarray,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        mask: Sequence[np.ndarray] | None = None,
    ) -> list[int]:
        """Add a token to each of these rows whose turn goes on; return the rows whose turn ends with it.

        Args:
            rows: int64 [L].
            token_ids: Integers [L].
            logprobs: float32 [L], nats.
            mask: Of each, int32 ids of the tokens that could be sampled, if they are kept.
        """
        goes_on = ~self.ended[rows]
        for row, is_live, ids in zip(rows.tolist(), goes_on.tolist(), mask or (), strict=mask is not None):
            if is_live:
                self._masks[row].append(ids)
        rows, token_ids, logprobs = rows[goes_on], token_ids[goes_on], logprobs[goes_on]
        positions = self.counts[rows]
        self._token_ids[rows, positions] = token_ids
        self._logprobs[rows, positions] = logprobs
        self.counts[rows] = positions + 1
        stops = np.isin(token_ids, self._stop_ids)
        if self._stop_strings is not None:
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

    def take_mask(self, row: int) -> SamplingMask | None:
        """Return which tokens a row could have sampled, and forget it; None if the sampling doesn't keep it."""
        mask = self._masks.pop(row)
        if not mask:
            return None
        counts = np.array([len(ids) for ids in mask], dtype=np.int32)
        return SamplingMask(counts, np.concatenate(mask))
