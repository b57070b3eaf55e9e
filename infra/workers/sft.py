"""The policy worker of supervised fine-tuning, which also puts the rows of each step, and scores the held-out ones."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from infra.datasets.sft import SftDataset, SftRow, token_columns
from infra.models.load import load_tokenizer, num_embeddings
from infra.workers.inputs import check_inputs, open_rows
from infra.workers.policy import PolicyWorker
from rl_core.columns.codec import value_dtypes
from rl_core.columns.jagged import PREFIX_COLUMN, as_tensor, token_dtype
from rl_core.columns.prompts import find_prefixes
from rl_core.planning import plan_forward
from rl_core.rollout.chat import decode_texts
from rl_core.rollout.responses import describe_responses
from rl_core.training.rows import packed_row
from rl_core.training.sharding import release_gathered
from schemas.batch import ChunkKey
from schemas.metrics import Mean, Metrics
from schemas.plan import ForwardPlan
from schemas.rollout import PutResult, RolloutShard, SampleText, make_sample_id

SAMPLES = 4  # texts of a step's rows, for users to read


class SftWorker(PolicyWorker):
    """One rank of the policy. Rank 0 puts the rows; every rank scores its part of the held-out ones."""

    def describe_rows(self, step: int) -> tuple[RolloutShard, Metrics]:
        """Return the scalars of the rows that a step takes, which `put_rows` puts, and the epochs up to its end."""
        rows = self._rows_of(step)
        numbers = tuple(range(len(rows)))
        prefixes, prefix_lengths = self._prefixes(rows) or ((), ())
        shard = RolloutShard(
            shard=0,
            worker=0,
            groups=numbers,
            rewards=(None,) * len(rows),
            group_ids=numbers,
            prompt_lengths=tuple(len(row.prompt_ids) for row in rows),
            prefixes=tuple(map(int, prefixes)),
            prefix_lengths=tuple(map(int, prefix_lengths)),
            **describe_responses(
                [row.response_ids for row in rows], [row.loss_mask for row in rows], ["stop"] * len(rows)
            ),
            samples=tuple(
                SampleText(prompt=prompt, response=response, answer="", reward=None)
                for prompt, response in zip(*self._texts(rows[:SAMPLES]), strict=True)
            ),
        )
        return shard, self._train_rows.epoch_metrics(step, len(rows), self._config.data.source_names)

    def put_rows(self, step: int) -> PutResult:
        """Put the rows of a step as one chunk."""
        rows = self._rows_of(step)
        prompts, responses = self._texts(rows)
        texts = {"prompt_text": prompts, "response_text": responses, "answer": [""] * len(rows)}
        texts |= {"info": ["{}"] * len(rows), "finish_reason": ["stop"] * len(rows)}
        texts["sample_id"] = [make_sample_id(step, number, 0) for number in range(len(rows))]
        numbers: dict[str, Any] = {"group_id": range(len(rows)), "policy_version": [step] * len(rows)}
        if (prefixes := self._prefixes(rows)) is not None:
            numbers[PREFIX_COLUMN] = prefixes[1]
        columns = pa.record_batch(
            {
                **token_columns(rows, self._dtype),
                "reward": pa.nulls(len(rows), pa.float32()),
                **{name: pa.array(values, pa.string()) for name, values in texts.items()},
                **{name: pa.array(values, pa.int32()) for name, values in numbers.items()},
            }
        )
        chunk = self._store.put(ChunkKey(run_id=self._run.run_id, step=step, stage="rollout"), columns)
        self._store.flush()
        return PutResult(chunk=chunk, dtypes=value_dtypes(columns), traffic=self._store.take_traffic("put"))

    def plan_held_out(self, num_ranks: int) -> ForwardPlan:
        """Return the assignment of the held-out rows to the ranks that score them."""
        rows, count = self._held_out_rows, self._config.eval.num_prompts
        return plan_forward(
            rows.prompt_lengths[:count],
            rows.response_lengths[:count],
            num_ranks=num_ranks,
            token_budget=self._config.packing.token_budget,
            prefixes=self._held_out_prefixes,
        )

    def score_held_out(self, plan: ForwardPlan, version: int) -> Metrics:
        """Return loss and accuracy of this rank's held-out tokens, which merge exactly.

        Raises:
            VersionError: The worker holds another version.
        """
        self._check_version(version)
        self.wake(["weights"])
        loss, num_correct, num_tokens = 0.0, 0, 0
        with self._collective(), torch.no_grad():
            for micro in plan.rank(self._rank):
                columns = pa.record_batch(token_columns([self._held_out_rows[row] for row in micro.rows], self._dtype))
                if self._held_out_prefixes is not None:
                    common = self._held_out_prefixes[1][[*micro.rows]]
                    columns = columns.append_column(PREFIX_COLUMN, pa.array(common, pa.int32()))
                row = packed_row(columns, micro.num_tokens).to(self._module.model.device)
                mask = as_tensor(columns["loss_mask"])
                scores = self._module(row, top_k=1)
                loss -= float(scores.logprobs.cpu()[mask].double().sum())
                num_correct += int((scores.top_ids[:, 0] == row.targets).cpu()[mask].sum())
                num_tokens += int(mask.sum())
        release_gathered(self._module)
        return {"loss": Mean(total=loss, weight=num_tokens), "accuracy": Mean(total=num_correct, weight=num_tokens)}

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._config.model)

    @cached_property
    def _train_rows(self) -> SftDataset:
        """The training rows: rank 0 maps them when the first step wants some, and a replay never."""
        check_inputs(self._directory, self._config)
        return open_rows(self._directory, self._config, "train")

    @cached_property
    def _held_out_rows(self) -> SftDataset:
        """All held-out rows, of which the first `eval.num_prompts` are scored."""
        assert self._config.data.eval_path is not None, "there are no held-out rows"
        check_inputs(self._directory, self._config)
        return open_rows(self._directory, self._config, "held-out")

    @cached_property
    def _held_out_prefixes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        rows = self._held_out_rows
        return self._prefixes([rows[number] for number in range(min(len(rows), self._config.eval.num_prompts))])

    def _prefixes(self, rows: Sequence[SftRow]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return what rows begin with in common, see `find_prefixes`, if a micro-batch computes it once."""
        if not self._config.packing.share_prompts:
            return None
        return find_prefixes([row.prompt_ids for row in rows], sum(row.num_tokens for row in rows))

    @property
    def _dtype(self) -> np.dtype[Any]:
        return token_dtype(num_embeddings(self._config.model))

    def _rows_of(self, step: int) -> list[SftRow]:
        config = self._config
        assert config.sft is not None
        numbers = self._train_rows.rows_for_step(step, config.sft.num_rows, config.seed, config.data.shuffle)
        return [self._train_rows[number] for number in numbers]

    def _texts(self, rows: Sequence[SftRow]) -> tuple[list[str], list[str]]:
        """Return the texts of prompts and responses, with control tokens."""
        prompts, responses = [row.prompt_ids.tolist() for row in rows], [row.response_ids.tolist() for row in rows]
        return decode_texts(self._tokenizer, prompts), decode_texts(self._tokenizer, responses)
