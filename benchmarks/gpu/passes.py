"""Scoring and training of rows of uneven lengths, packed and padded: their time and peak memory."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.planning.pack import pack
from rl_core.planning.throughput import ModelWork
from rl_core.scoring import PackedRow, pack_row, packed_scores, use_packed_attention, use_padded_attention
from rl_core.scoring.forward import padded_hidden_states
from rl_core.scoring.head import HeadOptions
from rl_core.scoring.logprobs import score_hidden_states

Lengths = NDArray[np.int64]

MIN_ROW_TOKENS = 4
PROMPT_DIVISOR = 4  # one in PROMPT_DIVISOR tokens belongs to a prompt, and isn't scored
LENGTH_SIGMA = 0.6  # standard deviation of the log lengths
MAX_PADDED_FORWARDS = 3  # padded micro-batches all have the same shape, so a few of them give the speed of all
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # resets VmHWM, see proc(5)


@dataclass(frozen=True)
class Batch:
    """Rows of N lengths, in tokens: one is `longest`, the others are log-normal."""

    num_tokens: int  # their sum
    fill: float  # the fraction of the padded rectangle that is real tokens, which sets the number of rows
    longest: int  # the longest row
    token_budget: int  # maximum positions per forward, including padding
    chunk_tokens: int  # tokens whose logits exist at once

    def lengths(self) -> Lengths:
        """Draw the lengths [N], the same each time."""
        rng, longest = np.random.default_rng(0), self.longest
        num_others = max(2, round(self.num_tokens / (self.fill * longest))) - 1
        left = self.num_tokens - longest
        assert num_others * MIN_ROW_TOKENS <= left <= num_others * longest, "no rows have these lengths"
        weights = rng.lognormal(0, LENGTH_SIGMA, num_others)
        lengths = np.clip(weights / weights.sum() * left, MIN_ROW_TOKENS, longest).astype(np.int64)
        while (missing := left - int(lengths.sum())) != 0:
            step = 1 if missing > 0 else -1
            movable = np.flatnonzero((lengths + step >= MIN_ROW_TOKENS) & (lengths + step <= longest))
            lengths[movable[: abs(missing)]] += step
        return rng.permutation(np.append(lengths, longest))


@dataclass
class Pass:
    """One way to compute a batch's log-probs, and its measurements."""

    switch: Callable[[PreTrainedModel], None]  # to its attention implementation
    score: Callable[[PreTrainedModel, PackedRow], Tensor]  # [R] log-probs of one micro-batch
    micro_batches: list[PackedRow]  # the ones that are run
    fraction: float  # of the batch's positions that these compute
    num_tokens: int  # real tokens of the whole batch
    peak_mb: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second of all micro-batches, extrapolated from the ones that were run."""
        return self.fraction * self.num_tokens / statistics.median(self.seconds)

    def measure_peak(self, model: PreTrainedModel, is_training: bool) -> None:
        """Record the memory of the largest micro-batch beyond the weights: activations and, in training, gradients."""
        before = reset_peak(model.device)
        self._run(model, [max(self.micro_batches, key=lambda row: len(row.input_ids))], is_training)
        self.peak_mb = (peak_bytes(model.device) - before) / 1e6

    def measure_time(self, model: PreTrainedModel, is_training: bool) -> None:
        """Record the time of all micro-batches: the forwards and backwards of one optimizer step."""
        _synchronize(model.device)
        start = time.perf_counter()
        self._run(model, self.micro_batches, is_training)
        self.seconds.append(time.perf_counter() - start)

    def utilization(self, model: PreTrainedModel, is_training: bool, peak_tflops: float) -> float:
        """Return the model FLOPs utilization (MFU): the model's own operations per second over the device's peak."""
        work = ModelWork.of(model)
        lengths, responses = (
            torch.cat(parts).cpu().numpy()
            for parts in zip(
                *((row.cu_seqlens.diff(), row.response_lengths) for row in self.micro_batches), strict=True
            )
        )
        rows = (lengths - responses, responses)
        operations = work.update(*rows, checkpointing=False) if is_training else work.forward(*rows)
        return operations / int(lengths.sum()) * self.tokens_per_second / (peak_tflops * 1e12)

    def _run(self, model: PreTrainedModel, rows: list[PackedRow], is_training: bool) -> None:
        self.switch(model)
        with torch.set_grad_enabled(is_training):
            for row in rows:
                logprobs = self.score(model, row)
                if is_training:
                    logprobs.mean().backward()
        _synchronize(model.device)
        model.zero_grad(set_to_none=True)


def packed_pass(batch: Batch, model: PreTrainedModel) -> Pass:
    """Return Sluice's own: rows packed up to the budget."""
    lengths = np.sort(batch.lengths())
    groups = [lengths[rows] for rows in pack(np.arange(len(lengths)), lengths, batch.token_budget)]
    rows = [_random_row(group, model) for group in groups]
    return Pass(use_packed_attention, partial(_packed_logprobs, batch.chunk_tokens), rows, 1.0, batch.num_tokens)


def padded_pass(batch: Batch, model: PreTrainedModel) -> Pass:
    """Return the full padded rectangle, as many rows at a time as the budget allows."""
    lengths, num_rows = np.sort(batch.lengths()), batch.token_budget // batch.longest
    groups = [lengths[start : start + num_rows] for start in range(0, len(lengths), num_rows)]
    run = groups[-MAX_PADDED_FORWARDS:]
    fraction = sum(map(len, run)) / len(lengths)
    score = partial(_padded_logprobs, batch.chunk_tokens, batch.longest)
    rows = [_random_row(group, model) for group in run]
    return Pass(use_padded_attention, score, rows, fraction, batch.num_tokens)


def _packed_logprobs(chunk_tokens: int, model: PreTrainedModel, row: PackedRow) -> Tensor:
    return packed_scores(model, row, temperature=1.0, chunk_tokens=chunk_tokens).logprobs


def _padded_logprobs(chunk_tokens: int, width: int, model: PreTrainedModel, row: PackedRow) -> Tensor:
    """Return log-probs [R] computed on a batch padded to `width`, with the same scoring head as the packed row's."""
    options = HeadOptions(1.0, 1.0, None, chunk_tokens, top_k=0, has_entropy=False, has_entropy_grad=False)
    states, index = padded_hidden_states(model, row, width)
    return score_hidden_states(model, states.index_select(0, index[row.predict_index]), row.targets, options).logprobs


def _random_row(lengths: Lengths, model: PreTrainedModel) -> PackedRow:
    """Return random tokens as a packed row; the first part of every sequence is its prompt."""
    prompts, generator = np.maximum(1, lengths // PROMPT_DIVISOR), torch.Generator().manual_seed(0)
    sizes = (int(prompts.sum()), int((lengths - prompts).sum()))
    ids = [torch.randint(model.config.vocab_size, (size,), generator=generator) for size in sizes]
    return pack_row(ids[0], prompts, ids[1], lengths - prompts).to(model.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> int:
    """Reset the high-water mark, and return the bytes in use now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that malloc still holds would mask the pass's own
    CLEAR_REFS.write_text(RESET_PEAK)
    return _status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that were in use at once since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
