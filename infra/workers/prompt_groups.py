"""What one worker samples: the groups of a step, parts of the groups of the steps after it, and held-out prompts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

import numpy as np
import pyarrow as pa

from infra.datasets import PromptDataset, PromptRow
from infra.engines.base import Generation, GenerationRequest, RolloutEngine, Sampling, generate
from infra.environments.journal import Batch, Journal
from infra.storage.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.workers.samples import Sample, first_failure, num_sampled
from infra.workers.sampling import ResponseSampler, ResponseStart, ScoredResponse
from rl_core.columns.codec import value_dtypes
from rl_core.columns.jagged import jagged, split_rows, token_dtype
from rl_core.rollout.evaluation import number_answers
from rl_core.rollout.seeding import derive_seed
from rl_core.views import new_batch
from schemas.batch import ChunkKey
from schemas.config.changes import sampling_digest
from schemas.config.run import RunConfig
from schemas.rollout import FinishReason, PartialGroups, SourceSchedule, make_sample_id
from schemas.step import EvalShard, RunHandle

PARTIAL_COLUMNS = ("response_ids", "sampler_logprobs", "sampler_versions", "finish_reason")


class Evaluator:
    """Samples and scores responses to held-out prompts, as the config's `eval` section says."""

    def __init__(self, config: RunConfig, prompts: PromptDataset, sampler: ResponseSampler, sampling: Sampling) -> None:
        self._config, self._prompts, self._sampler, self._sampling = config, prompts, sampler, sampling

    @property
    def num_prompts(self) -> int:
        """The number of held-out prompts."""
        return len(self._prompts)

    def generate(self, rows: Sequence[int]) -> EvalShard:
        """Generate and score `eval.samples_per_prompt` responses to each of these held-out prompts, in one batch.

        They are a function of the config, the weights and the rows.
        """
        n = self._config.eval.samples_per_prompt
        seed, prompts = self._config.seed, [self._prompts[row] for row in rows]
        starts = [
            ResponseStart(
                prompt, row, derive_seed(seed, "eval", row, sample), derive_seed(seed, "eval environment", row)
            )
            for row, prompt in zip(rows, prompts, strict=True)
            for sample in range(n)
        ]
        _, responses, _ = self._sampler.sample(starts, self._sampling)
        outcomes = [response.outcome for response in responses]
        given = [response.answer for response in responses]
        return EvalShard(
            data_sources=tuple(prompt.data_source for prompt in prompts),
            rewards=tuple(outcome.reward for outcome in outcomes),
            answers=tuple(
                answer for first in range(0, len(given), n) for answer in number_answers(given[first : first + n])
            ),
            response_lengths=tuple(num_sampled(response.generation) for response in responses),
            finish_reasons=tuple(response.generation.finish_reason for response in responses),
            failure=first_failure(outcomes),
        )


@dataclass(frozen=True)
class Row:
    """A sample of a prompt, with its response so far."""

    step: int  # the step that will train on it
    group: int  # its prompt's number within that step
    number: int  # its number within the group
    prompt: PromptRow  # its prompt
    response: Generation | None = None  # its tokens so far; None: it has not begun

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
    token_ids, logprobs, versions = (split_rows(columns[name]) for name in PARTIAL_COLUMNS[:3])
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


class GroupSampler:
    """Samples groups: all rows of a prompt.

    With `runtime.max_staleness` n above 1, the rows of a step are begun n steps before it. Each of these steps samples
    up to the next n-th of their tokens, with its own weights, together with those of the steps between.

    Args:
        run: The run.
        sampler: The engine with the reward.
        prompts: The training prompts.
        store: The column store, which keeps what is not finished.
        sampling: How tokens are sampled.
        vocab_size: Token ids are below this.
    """

    def __init__(
        self,
        run: RunHandle,
        sampler: ResponseSampler,
        prompts: PromptDataset,
        store: ColumnStore,
        sampling: Sampling,
        vocab_size: int,
    ) -> None:
        self._run, self._config, self._sampler, self._prompts = run, run.config, sampler, prompts
        self._store, self._sampling, self._vocab_size = store, sampling, vocab_size

    def sample(
        self,
        step: int,
        shard: int,
        groups: Sequence[int],
        begun: Sequence[PartialGroups],
        schedules: Mapping[int, SourceSchedule],
    ) -> tuple[list[Sample], tuple[PartialGroups, ...], dict[str, float]]:
        """Finish these groups of `step`, and continue or begin those of the steps after it.

        Args:
            step: The step that trains on them next.
            shard: The number of these groups' shard within each of the steps.
            groups: The groups' numbers within each of the steps.
            begun: What the step before has left of the same shard.
            schedules: The curriculum's, by step; none without one.

        Returns:
            The step's samples, with rewards; what is not finished, stored; and the seconds of each part.

        Raises:
            StoreError: What was begun can't be read.
        """
        if self._config.runtime.max_staleness <= 1:
            return self._sample_whole(step, shard, groups, schedules.get(step))
        left = {part.step: part for part in begun}
        steps = self._config.sampled_steps(step)
        everything = [row for each in steps for row in self._rows(each, groups, left.get(each), schedules.get(each))]
        limits = [self._config.token_limit(row.step - step) for row in everything]
        later: dict[int, Generation] = {}

        def finished() -> Iterator[tuple[int, Generation]]:
            """Yield the responses of the step itself; keep the others."""
            engine, seed = self._sampler.engine, self._config.seed
            for index, response in continue_rows(engine, everything, limits, self._sampling, seed):
                if everything[index].step == step:
                    yield index, response
                else:
                    later[index] = response

        own = [row for row in everything if row.step == step]
        groups_of = [row.group for row in own]
        responses, seconds = self._sampler.score([row.prompt for row in own], groups_of, finished())
        samples = [_sample(row, row.prompt, response) for row, response in zip(own, responses, strict=True)]
        kept = []
        for each in steps[1:]:
            indices = [index for index, row in enumerate(everything) if row.step == each]
            rows, so_far = [everything[index] for index in indices], [later[index] for index in indices]
            kept.append(self._keep(step, shard, each, rows, so_far))
        self._store.flush()
        return samples, tuple(kept), seconds

    def _sample_whole(
        self, step: int, shard: int, groups: Sequence[int], schedule: SourceSchedule | None
    ) -> tuple[list[Sample], tuple[PartialGroups, ...], dict[str, float]]:
        """Sample the groups of one step, from beginning to end."""
        seed, rows = self._config.seed, self._rows(step, groups, None, schedule)
        starts = [
            ResponseStart(row.prompt, row.group, row.seed(seed), derive_seed(seed, "environment", step, row.group))
            for row in rows
        ]
        with self._journal(step, shard, groups, rows) as journal:
            prompts, responses, seconds = self._sampler.sample(starts, self._sampling, journal)
        return [_sample(*each) for each in zip(rows, prompts, responses, strict=True)], (), seconds

    def _journal(
        self, step: int, shard: int, groups: Sequence[int], rows: Sequence[Row]
    ) -> AbstractContextManager[Journal | None]:
        if not self._config.keeps_journal:
            return nullcontext()
        batch = Batch(
            run_id=self._run.run_id,
            step=step,
            batch=shard,
            settings=sampling_digest(self._config),
            groups=tuple(groups),
        )
        keys = [(row.group, row.number) for row in rows]
        return Journal(RunDirectory.of(self._run).journals, batch, keys, self._vocab_size)

    def _rows(
        self, step: int, groups: Sequence[int], begun: PartialGroups | None, schedule: SourceSchedule | None
    ) -> list[Row]:
        """Return the rows of these groups of `step`, with what was sampled of them before."""
        config = self._config
        numbers = self._prompts.rows_for_groups(
            step, groups, config.rollout.num_prompts, config.seed, config.data.shuffle, schedule
        )
        samples = range(config.rollout.samples_per_prompt)
        # Known by the group's number within the step, not by its prompt: a small file may give one prompt twice.
        new = [
            Row(step, group, number, prompt)
            for group, prompt in zip(groups, map(self._prompts.__getitem__, numbers), strict=True)
            for number in samples
        ]
        if begun is None:
            return new
        so_far = from_partial_columns(self._store.read(begun.batch, PARTIAL_COLUMNS))
        return [replace(row, response=response) for row, response in zip(new, so_far, strict=True)]

    def _keep(
        self, step: int, shard: int, later: int, rows: Sequence[Row], responses: Sequence[Generation]
    ) -> PartialGroups:
        """Store what there is of the rows of a later step."""
        columns = to_partial_columns(responses, self._vocab_size)
        key = ChunkKey(run_id=self._run.run_id, step=step, stage="partial", shard=shard, attempt=later - step)
        batch = new_batch(
            run_id=self._run.run_id,
            step=step,
            policy_version=self._config.sampler_version(step),
            chunks=[self._store.put(key, columns)],
            dtypes=value_dtypes(columns),
            prompt_lengths=np.array([len(row.prompt.prompt_ids) for row in rows]),
            response_lengths=np.array([len(response.token_ids) for response in responses]),
        )
        return PartialGroups(step=later, batch=batch)


def _sample(row: Row, prompt: PromptRow, response: ScoredResponse) -> Sample:
    return Sample(make_sample_id(row.step, row.group, row.number), row.group, prompt, response)
