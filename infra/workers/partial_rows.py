"""Rows that are under way: what was sampled of them so far, and how the store keeps that for the next step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import numpy as np
import pyarrow as pa

from infra.datasets import PromptRow
from infra.engines.base import Generation, GenerationRequest, RolloutEngine, Sampling, generate
from rl_core.columns.jagged import flat_values, jagged, row_lengths, token_dtype
from rl_core.rollout.seeding import derive_seed
from schemas.rollout import FinishReason

PARTIAL_COLUMNS = ("response_ids", "sampler_logprobs", "sampler_versions", "finish_reason")


@dataclass(frozen=True)
class Row:
    """A sample of a prompt, with its response so far.

    Attributes:
        step: The step that will train on it.
        group: Its prompt's number within that step.
        number: Its number within the group.
        prompt: Its prompt.
        response: Its tokens so far; None: it has not begun.
    """

    step: int
    group: int
    number: int
    prompt: PromptRow
    response: Generation | None = None

    @property
    def num_tokens(self) -> int:
        """The tokens of its response so far."""
        return len(self.response.token_ids) if self.response else 0

    def is_complete(self, limit: int) -> bool:
        """Return whether its response ended, or has `limit` tokens."""
        return self.response is not None and (self.response.finish_reason == "stop" or self.num_tokens >= limit)

    def seed(self, run_seed: int) -> int:
        """Return the seed of its next tokens."""
        parts = "train", self.step, self.group, self.number
        return derive_seed(run_seed, *parts, self.num_tokens) if self.num_tokens else derive_seed(run_seed, *parts)


def continue_rows(
    engine: RolloutEngine,
    rows: Sequence[Row],
    limits: Sequence[int],
    sampling: Sampling,
    seed: int,
) -> Iterator[tuple[int, Generation]]:
    """Sample on until each row has ended or has its limit of tokens, all rows together.

    Args:
        engine: The engine, which holds the version that samples.
        rows: N rows.
        limits: N, the tokens that a row may have by now.
        sampling: How tokens are sampled.
        seed: The run's.

    Yields:
        A row's index and its whole response so far, with the version of each token, as soon as it is known.
    """
    assert engine.version is not None, "an engine without a version can't sample"
    under_way: list[int] = []
    for index, (row, limit) in enumerate(zip(rows, limits, strict=True)):
        if row.response is not None and row.is_complete(limit):
            yield index, row.response
        else:
            under_way.append(index)
    requests = []
    for _, members in groupby(under_way, key=lambda index: _history_of(rows[index], index)):  # it is prefilled once
        same = list(members)
        first, limit = rows[same[0]], limits[same[0]]
        so_far = first.response.token_ids if first.response else np.empty(0, dtype=np.int64)
        history = np.concatenate([np.asarray(first.prompt.prompt_ids), so_far])
        seeds = tuple(rows[index].seed(seed) for index in same)
        requests.append(GenerationRequest(history, seeds, limit - first.num_tokens))
    for number, generation in generate(engine, requests, sampling):
        yield under_way[number], _joined(rows[under_way[number]].response, generation, engine.version)


def to_partial_columns(responses: Sequence[Generation], vocab_size: int) -> pa.RecordBatch:
    """Return `PARTIAL_COLUMNS` of N responses."""
    lengths = np.array([len(response.token_ids) for response in responses])
    token_ids = np.concatenate([response.token_ids for response in responses])
    versions = [response.versions for response in responses if response.versions is not None]
    return pa.record_batch(
        {
            "response_ids": jagged(token_ids.astype(token_dtype(vocab_size)), lengths),
            "sampler_logprobs": jagged(np.concatenate([response.logprobs for response in responses]), lengths),
            "sampler_versions": jagged(np.concatenate(versions), lengths),
            "finish_reason": pa.array([response.finish_reason for response in responses], pa.string()),
        }
    )


def from_partial_columns(columns: pa.RecordBatch) -> list[Generation]:
    """Return the N responses of which `columns` are the `PARTIAL_COLUMNS`."""
    ends = np.cumsum(row_lengths(columns["response_ids"]))[:-1]
    token_ids, logprobs, versions = (np.split(flat_values(columns[name]), ends) for name in PARTIAL_COLUMNS[:3])
    reasons = columns["finish_reason"].to_pylist()
    return [
        Generation(ids.astype(np.int32), scores, cast(FinishReason, reason), own)
        for ids, scores, own, reason in zip(token_ids, logprobs, versions, reasons, strict=True)
    ]


def _history_of(row: Row, index: int) -> tuple[int, ...]:
    """Return what tells a row's tokens so far from others': its own, or a prompt that no sample has continued."""
    return (index,) if row.num_tokens else (row.step, row.group)


def _joined(before: Generation | None, after: Generation, version: int) -> Generation:
    versions = np.full(len(after.token_ids), version, dtype=np.int32)
    if before is None:
        return Generation(after.token_ids, after.logprobs, after.finish_reason, versions)
    assert before.versions is not None
    return Generation(
        np.concatenate([before.token_ids, after.token_ids]),
        np.concatenate([before.logprobs, after.logprobs]),
        after.finish_reason,
        np.concatenate([before.versions, versions]),
    )
