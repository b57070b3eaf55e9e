"""One batch of rows of uneven lengths, and the ways to compute its log-probs.

N rows of L_i tokens, T = sum(L_i). Fill is T / (N * max(L_i)).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.planning.pack import pack
from rl_core.scoring import PackedRow, pack_row, packed_scores, use_packed_attention, use_padded_attention
from rl_core.scoring.forward import padded_hidden_states
from rl_core.scoring.head import HeadOptions
from rl_core.scoring.logprobs import score_hidden_states
from schemas.errors import ConfigError

Lengths = NDArray[np.int64]

MIN_ROW_TOKENS = 4
PROMPT_DIVISOR = 4  # one in PROMPT_DIVISOR tokens belongs to a prompt, and isn't scored
LENGTH_SIGMA = 0.6  # standard deviation of the log lengths
MAX_PADDED_FORWARDS = 3  # padded micro-batches all have the same shape, so a few of them give the speed of all
MAX_ROW_FORWARDS = 32


@dataclass(frozen=True)
class Workload:
    """The batch that every path computes."""

    lengths: Lengths  # [N] tokens of each row
    vocab_size: int
    token_budget: int  # maximum positions per forward, including padding
    chunk_tokens: int
    device: torch.device

    @property
    def fill(self) -> float:
        """The fraction of the padded rectangle that is real tokens."""
        return float(self.lengths.sum() / (len(self.lengths) * self.lengths.max()))


@dataclass(frozen=True, eq=False)
class Path:
    """One way to compute the log-probs: its micro-batches, and how to score one."""

    name: str
    switch: Callable[[PreTrainedModel], None]  # to the path's attention implementation
    score: Callable[[PreTrainedModel, PackedRow], Tensor]  # [R] log-probs of one micro-batch
    micro_batches: list[PackedRow]  # the ones that are run
    num_tokens: int  # real tokens of all micro-batches, run or not
    num_positions: int  # positions that all of them compute
    run_positions: int  # positions that `micro_batches` compute


def random_lengths(num_tokens: int, fill: float, longest: int, seed: int = 0) -> Lengths:
    """Draw lengths that add up to `num_tokens`: one is `longest`, the others are log-normal; `fill` sets their number.

    Raises:
        ConfigError: No rows can have these lengths.
    """
    rng = np.random.default_rng(seed)
    num_rows = max(2, round(num_tokens / (fill * longest)))
    if not (num_rows - 1) * MIN_ROW_TOKENS <= num_tokens - longest <= (num_rows - 1) * longest:
        raise ConfigError(
            f"--fills {fill}: {num_rows} rows of at most {longest} tokens can't hold {num_tokens};"
            " change --fills, --tokens or --longest"
        )
    weights = rng.lognormal(0, LENGTH_SIGMA, num_rows - 1)
    lengths = np.clip(weights / weights.sum() * (num_tokens - longest), MIN_ROW_TOKENS, longest).astype(np.int64)
    while (missing := num_tokens - longest - int(lengths.sum())) != 0:
        step = 1 if missing > 0 else -1
        movable = np.flatnonzero((lengths + step >= MIN_ROW_TOKENS) & (lengths + step <= longest))
        lengths[movable[: abs(missing)]] += step
    return rng.permutation(np.append(lengths, longest))


def all_paths(workload: Workload) -> list[Path]:
    """Return every path, with its micro-batches on the device."""
    return [
        packed_path(workload),
        _padded(workload),
        _row_by_row(workload),
        _dense(workload, "dense", _equal_work_rows(workload.lengths)),
        _dense(workload, "dense_equal_count", len(workload.lengths)),
    ]


def packed_logprobs(workload: Workload, model: PreTrainedModel, row: PackedRow) -> Tensor:
    """Return log-probs [R] computed on the packed row."""
    return packed_scores(model, row, temperature=1.0, chunk_tokens=workload.chunk_tokens).logprobs


def padded_logprobs(workload: Workload, width: int, model: PreTrainedModel, row: PackedRow) -> Tensor:
    """Return log-probs [R] computed on a batch padded to `width`, with the same scoring head as the packed row's."""
    options = HeadOptions(1.0, 1.0, None, workload.chunk_tokens, top_k=0, has_entropy=False, has_entropy_grad=False)
    states, index = padded_hidden_states(model, row, width)
    return score_hidden_states(model, states.index_select(0, index[row.predict_index]), row.targets, options).logprobs


def random_row(lengths: Lengths, workload: Workload) -> PackedRow:
    """Return random tokens as a packed row; the first part of every sequence is its prompt."""
    prompts = np.maximum(1, lengths // PROMPT_DIVISOR)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(workload.vocab_size, (int(part.sum()),), generator=generator) for part in (prompts, lengths)]
    return pack_row(ids[0], prompts, ids[1][: int((lengths - prompts).sum())], lengths - prompts).to(workload.device)


def packed_path(workload: Workload) -> Path:
    """Return the path that Sluice takes: rows packed up to the budget."""
    lengths = workload.lengths
    groups = [lengths[rows] for rows in pack(np.arange(len(lengths)), lengths, workload.token_budget)]
    return _path("packed", workload, use_packed_attention, partial(packed_logprobs, workload), groups)


def _padded(workload: Workload) -> Path:
    """Return the path over the full padded rectangle, as many rows at a time as the budget allows."""
    width = int(workload.lengths.max())
    groups = _groups(workload.lengths, workload.token_budget // width)
    score = partial(padded_logprobs, workload, width)
    return _path("padded", workload, use_padded_attention, score, groups, MAX_PADDED_FORWARDS, width)


def _row_by_row(workload: Workload) -> Path:
    """Return the path with one forward per row: no padding, but only one row at a time to keep the machine busy."""
    groups, score = _groups(workload.lengths, 1), partial(padded_logprobs, workload, 0)
    return _path("row_by_row", workload, use_padded_attention, score, groups, MAX_ROW_FORWARDS)


def _dense(workload: Workload, name: str, num_rows: int) -> Path:
    """Return the path over rows of equal length, through the model's own attention: no padding, nothing ragged."""
    length = int(workload.lengths.sum()) // num_rows
    groups = _groups(np.full(num_rows, length, dtype=np.int64), max(1, workload.token_budget // length))
    return _path(name, workload, use_padded_attention, partial(padded_logprobs, workload, 0), groups)


def _equal_work_rows(lengths: Lengths) -> int:
    """Return the number of equal rows with the same sum of lengths and the same sum of squared lengths."""
    return max(1, round(int(lengths.sum()) ** 2 / int((lengths**2).sum())))


def _path(
    name: str,
    workload: Workload,
    switch: Callable[[PreTrainedModel], None],
    score: Callable[[PreTrainedModel, PackedRow], Tensor],
    groups: list[Lengths],
    max_forwards: int | None = None,
    width: int | None = None,
) -> Path:
    run = groups[:max_forwards]
    positions = [len(group) * width if width else int(group.sum()) for group in groups]
    return Path(
        name=name,
        switch=switch,
        score=score,
        micro_batches=[random_row(group, workload) for group in run],
        num_tokens=int(sum(group.sum() for group in groups)),
        num_positions=sum(positions),
        run_positions=sum(positions[: len(run)]),
    )


def _groups(lengths: Lengths, num_rows: int) -> list[Lengths]:
    return [lengths[start : start + num_rows] for start in range(0, len(lengths), num_rows)]
