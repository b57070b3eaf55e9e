"""The groups of a step, sampled by one worker; and parts of the groups of the steps after it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np

from infra.datasets import PromptDataset, PromptRow
from infra.engines.base import Generation, Sampling
from infra.environments.journal import Batch, Journal
from infra.storage.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.workers.partial_rows import PARTIAL_COLUMNS, Row, continue_rows, from_partial_columns, to_partial_columns
from infra.workers.samples import Sample
from infra.workers.sampling import ResponseSampler, ResponseStart, ScoredResponse
from rl_core.columns.codec import value_dtypes
from rl_core.rollout.seeding import derive_seed
from rl_core.views import new_batch
from schemas.batch import ChunkKey
from schemas.config.changes import sampling_digest
from schemas.rollout import PartialGroups, SourceSchedule, make_sample_id
from schemas.step import RunHandle


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
            Row(step, group, number, self._prompts[prompt])
            for group, prompt in zip(groups, numbers, strict=True)
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
