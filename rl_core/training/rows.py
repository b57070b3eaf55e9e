"""The rows of a step that one rank reads, their log-probs, and the tokens that a loss selects of all ranks' rows."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from rl_core.columns.jagged import (
    BRANCH_COLUMNS,
    PREFIX_COLUMN,
    TURN_COLUMNS,
    advantages_of_turns,
    as_tensor,
    branches_of,
    flat_values,
    jagged,
    offsets,
    row_lengths,
)
from rl_core.losses.distillation import distilled_advantages
from rl_core.planning.plan import rank_rows
from rl_core.rollout.seeding import derive_seed, uniforms
from rl_core.scoring import Branch, PackedRow, pack_row
from rl_core.training.scoring_module import ScoringModule
from rl_core.training.sharding import all_gather_object, release_gathered
from schemas.config.loss import ClipCovLoss, CovarianceLoss
from schemas.config.run import RunConfig
from schemas.errors import ScoringError
from schemas.plan import MicroBatch, UpdatePlan

TOKEN_COLUMNS = ("prompt_ids", "response_ids")
EXPERT_COLUMNS = ("prompt_experts", "response_experts")
MASK_COLUMNS = ("sampling_mask_counts", "sampling_mask_ids")
TOP_COLUMNS = ("teacher_top_logprobs", "teacher_top_ids")
SELECTED_COLUMN = "selected"  # of an update, not stored


@dataclass(frozen=True, eq=False)
class RankRows:
    """The rows of a step that one rank reads.

    Attributes:
        rows: [n] row numbers in the step's batch, ascending.
        columns: The columns of these n rows, in the same order.
    """

    rows: NDArray[np.int64]
    columns: pa.RecordBatch

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> pa.RecordBatch:
        """Return the given rows of the batch, in the given order."""
        return self.columns.take(pa.array(np.searchsorted(self.rows, np.asarray(rows, dtype=np.int64))))


def packed_row(columns: pa.RecordBatch, num_tokens: int | None = None) -> PackedRow:
    """Pack all rows' tokens: `TOKEN_COLUMNS`, and experts, branches, sampling masks and a teacher's if there are.

    Args:
        columns: The rows.
        num_tokens: What the plan counts for them: less than they have if equal prompts, or `PREFIX_COLUMN` of each, are
            to be computed once. None: all that they have.

    Raises:
        ScoringError: They have more tokens than planned, as their prompts differ.
    """
    prompts, responses = (columns[name] for name in TOKEN_COLUMNS)
    prompt_lengths, response_lengths = row_lengths(prompts), row_lengths(responses)
    replayed = EXPERT_COLUMNS[0] in columns.schema.names
    experts = [as_tensor(columns[name]) for name in EXPERT_COLUMNS] if replayed else None
    every = int(prompt_lengths.sum() + response_lengths.sum())
    planned = every if num_tokens is None else num_tokens
    parts, of_response = (as_tensor(prompts), prompt_lengths, as_tensor(responses), response_lengths), None
    if planned < every and PREFIX_COLUMN in columns.schema.names:
        parts, of_response = _after_prefixes(*parts, columns[PREFIX_COLUMN].to_numpy())
    row = pack_row(
        *parts,
        (experts[0], experts[1]) if experts else None,
        share_prompts=planned < every,
        branches=_branches(columns, prompt_lengths) if BRANCH_COLUMNS[-1] in columns.schema.names else (),
    )
    if planned < every and len(row.input_ids) > planned:
        raise ScoringError(
            f"a micro-batch of {len(prompt_lengths)} rows has {len(row.input_ids)} tokens, but is planned for "
            f"{planned}: prompts of a group differ, which the plan takes for equal; set packing.share_prompts = false"
        )
    if of_response is not None:
        row = row.score_only(of_response)
    further = {"mask_counts": MASK_COLUMNS[0], "mask_ids": MASK_COLUMNS[1], "top_ids": TOP_COLUMNS[1]}
    given: dict[str, Any] = {
        name: as_tensor(columns[column]).to(torch.int64)
        for name, column in further.items()
        if column in columns.schema.names
    }
    return replace(row, **given) if given else row


def _after_prefixes(
    prompt_ids: torch.Tensor,
    prompts: NDArray[np.int64],
    response_ids: torch.Tensor,
    responses: NDArray[np.int64],
    prefixes: NDArray[np.int32],
) -> tuple[tuple[torch.Tensor, NDArray[np.int64], torch.Tensor, NDArray[np.int64]], torch.Tensor]:
    """Divide rows after their first tokens, so many of each, instead of after their prompts.

    Returns both parts with their lengths, and which tokens of the second are a response's, bool.
    """
    rest = prompts - prefixes
    in_prefix, of_response = (
        torch.from_numpy(np.repeat(np.tile([first, not first], len(prompts)), np.stack(sizes, axis=1).ravel()))
        for first, sizes in ((True, (prefixes, rest)), (False, (rest, responses)))
    )
    ids = response_ids.new_empty(len(of_response))
    ids[~of_response], ids[of_response] = prompt_ids[~in_prefix], response_ids
    return (prompt_ids[in_prefix], prefixes.astype(np.int64), ids, rest + responses), of_response


def layout_columns(stored: Collection[str]) -> tuple[str, ...]:
    """Return the names of the columns by which rows branch, or share what they begin with, of those that are stored."""
    branches = BRANCH_COLUMNS if BRANCH_COLUMNS[-1] in stored else ()
    return (*branches, PREFIX_COLUMN) if PREFIX_COLUMN in stored else branches


def _branches(columns: pa.RecordBatch, prompt_lengths: NDArray[np.int64]) -> list[Branch]:
    found = branches_of(*(columns[name] for name in BRANCH_COLUMNS))
    parents = np.maximum(found.parent + prompt_lengths[found.row], -1)
    return [Branch(*each) for each in zip(found.row.tolist(), found.start.tolist(), parents.tolist(), strict=True)]


def token_advantages(columns: pa.RecordBatch) -> torch.Tensor:
    """Return the advantage of each response token of all rows: float32 [T].

    It is that of its turn, up to the next one, if there are `TURN_COLUMNS`, else that of its row.
    """
    if TURN_COLUMNS[0] not in columns.schema.names:
        return as_tensor(columns["advantages"]).repeat_interleave(
            torch.from_numpy(row_lengths(columns["response_ids"]))
        )
    return torch.from_numpy(advantages_of_turns(*(columns[name] for name in TURN_COLUMNS)))


def with_selected(
    rows: RankRows, update: UpdatePlan, rank: int, config: RunConfig, step: int, mesh: DeviceMesh | None
) -> RankRows:
    """Add the column `selected` (bool, response axis): the tokens of an update that its loss selects (a collective).

    A token's covariance is (log-prob - mean) (A - mean), with behavior log-probs, and means over all trained tokens of
    the update (Cui et al. 2025, arXiv:2505.22617, section 4). `kl_cov` selects the largest ones above 0; `clip_cov`
    draws among those within its bounds, by numbers that depend on seed, step, row and position alone. Ties go to the
    first row.

    Args:
        rows: At least this rank's rows of the update.
        update: The plan.
        rank: This rank.
        config: The run's config, with a loss that selects.
        step: The step.
        mesh: The ranks; None: this one only.
    """
    loss, columns, mine = config.loss, rows.columns, rank_rows([update], rank)
    assert isinstance(loss, CovarianceLoss), "a loss that selects no tokens has no column of them"
    bounds = offsets(columns["response_ids"])
    lengths, starts = np.diff(bounds), bounds[:-1]
    trained = flat_values(columns["loss_mask"]) & np.repeat(np.isin(rows.rows, mine), lengths)
    at, row = np.flatnonzero(trained), np.repeat(rows.rows, lengths)[trained]
    position = at - np.repeat(starts, lengths)[trained]
    values = torch.stack([as_tensor(columns["behavior_logprobs"]), _final_advantages(columns, config)], dim=1)
    covariances = _covariances(values.double().numpy()[at], row, mine, update.num_loss_tokens, mesh)
    if isinstance(loss, ClipCovLoss):
        keys = _draws(rows.rows, lengths, config.seed, step)[at]
        inside = (covariances > loss.cov_low) & (covariances < loss.cov_high)
    else:
        keys, inside = -covariances, covariances > 0
    count = max(1, int(loss.share * update.num_loss_tokens))
    own = _least(np.stack([keys, row, position], axis=1)[inside], count)
    chosen = _least(np.concatenate(all_gather_object(own, mesh)), count)[:, 1:].astype(np.int64)
    chosen = chosen[np.isin(chosen[:, 0], mine)]
    selected = np.zeros(len(trained), dtype=bool)
    selected[starts[np.searchsorted(rows.rows, chosen[:, 0])] + chosen[:, 1]] = True
    return RankRows(rows.rows, columns.append_column(SELECTED_COLUMN, jagged(selected, lengths)))


def _final_advantages(columns: pa.RecordBatch, config: RunConfig) -> torch.Tensor:
    """Return the advantages of all response tokens as the loss has them, with a teacher's part: float32 [T]."""
    advantages = token_advantages(columns)
    if config.distillation is None:
        return advantages
    difference = as_tensor(columns["behavior_logprobs"]) - as_tensor(columns["teacher_logprobs"])
    return distilled_advantages(config.distillation, advantages, difference)


def _covariances(
    values: NDArray[np.float64],
    row: NDArray[np.int64],
    mine: NDArray[np.int64],
    num_tokens: int,
    mesh: DeviceMesh | None,
) -> NDArray[np.float64]:
    """Return the covariance of each trained token of this rank: [T].

    Sums are added token by token in a row, then row by row in the order of their numbers, so that means have the same
    bits with any number of ranks.

    Args:
        values: [T, 2] log-probs and advantages.
        row: [T] row numbers.
        mine: [n] this rank's rows, ascending.
        num_tokens: Trained tokens of the update, over all ranks.
        mesh: The ranks.
    """
    with np.errstate(invalid="ignore"):  # what is not finite, the update reports
        sums = [np.bincount(np.searchsorted(mine, row), column, len(mine)) for column in values.T]
        parts = all_gather_object((mine, np.stack(sums, axis=1)), mesh)
        numbers, every = (np.concatenate(each) for each in zip(*parts, strict=True))
        apart = values - every[np.argsort(numbers)].sum(axis=0) / num_tokens
        found: NDArray[np.float64] = apart[:, 0] * apart[:, 1]
    return found


def _draws(rows: NDArray[np.int64], lengths: NDArray[np.int64], seed: int, step: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each response token of these rows: [T]."""
    seeds = [np.array([derive_seed(seed, "clip_cov", step, row)], dtype=np.uint64) for row in rows.tolist()]
    drawn = [uniforms(*each)[0] for each in zip(seeds, lengths.tolist(), strict=True)]
    return np.concatenate([np.empty(0), *drawn])


def _least(table: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return the first `count` rows of a table, [n, 3], sorted by its columns."""
    found: NDArray[np.float64] = table[np.lexsort(table.T[::-1])[:count]]
    return found


def score_rows(module: ScoringModule, rows: RankRows, micros: Sequence[MicroBatch]) -> NDArray[np.float32]:
    """Return only the log-probs of `score_top`: [R] float32."""
    return score_top(module, rows, micros, 0)[0]


@torch.no_grad()
def score_top(
    module: ScoringModule, rows: RankRows, micros: Sequence[MicroBatch], top_k: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Compute the log-probs of the rows' responses, and of the K most likely tokens at each position.

    Args:
        module: The model.
        rows: The rows, with `TOKEN_COLUMNS`, and `EXPERT_COLUMNS` if experts are replayed.
        micros: The micro-batches; a dummy only takes part in the other ranks' collectives.
        top_k: K.

    Returns:
        [R] and [R, K] float32, nats, the latter in descending order, and their token ids, [R, K] int64; in the order
        of `rows`.
    """
    device = next(module.parameters()).device
    lengths = row_lengths(rows.columns["response_ids"])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    size = int(starts[-1])
    values: tuple[NDArray[Any], NDArray[Any], NDArray[Any]] = (
        np.empty(size, np.float32),
        np.empty((size, top_k), np.float32),
        np.empty((size, top_k), np.int64),
    )
    for micro in micros:
        with record_function("forward"):
            scores = module(packed_row(rows.take(micro.rows), micro.num_tokens).to(device), top_k=top_k)
        at = np.searchsorted(rows.rows, np.asarray(micro.rows, dtype=np.int64))
        found = (scores.logprobs, scores.top_logprobs, scores.top_ids) if top_k else (scores.logprobs,)
        for all_values, own in zip(values, found, strict=False):
            for row, part in zip(at, np.split(own.cpu().numpy(), np.cumsum(lengths[at])[:-1]), strict=bool(len(at))):
                all_values[starts[row] : starts[row + 1]] = part
    release_gathered(module)
    return values
