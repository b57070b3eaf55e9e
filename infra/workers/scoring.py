"""The workers that score: a sharded model that computes log-probs of its part of a batch's rows.

The policy is one of them; the reference and the teachers are frozen.
"""

import json
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import ray
import torch
from torch.distributed.device_mesh import DeviceMesh

from infra.engines.families import shares_prompts
from infra.models.files import ModelFiles
from infra.models.load import num_embeddings
from infra.models.scoring import load_scoring_module
from infra.processes import take_all_files
from infra.ray.device import choose_device, set_threads
from infra.ray.rendezvous import Rendezvous, is_peer_failure, join
from infra.ray.tracing import start_tracing
from infra.storage.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.stores.open import open_store
from infra.workers.inputs import check_models
from infra.workers.layout import teacher_workers
from infra.workers.telemetry import WorkerTelemetry, profiled
from rl_core.columns.codec import value_dtypes
from rl_core.columns.jagged import flat_values, jagged, row_lengths, split_rows, token_dtype
from rl_core.columns.prompts import number_prefixes
from rl_core.losses.kl import row_kl
from rl_core.planning.plan import rank_rows
from rl_core.storages import Offload, Tensors
from rl_core.training import RankRows, mask_columns, score_top
from rl_core.training.rows import TOKEN_COLUMNS, TOP_COLUMNS, layout_columns
from rl_core.training.sharding import make_mesh, release_gathered
from rl_core.views import encode_ints, select
from schemas.batch import BatchHandle, ChunkKey
from schemas.errors import ColumnError, PipelineError, WorkerLostError
from schemas.placement import MemoryChange, Part
from schemas.plan import ForwardPlan
from schemas.rollout import PutResult
from schemas.step import ProcessGroupHandle, RunHandle, ScoreResult, TeacherRows


class ScoringWorker:
    """One rank of a model that computes log-probs of stored rows.

    Attributes:
        role: The worker's part in the run, as its measurements and traces name it.

    Args:
        run: The run it belongs to.
        rank: Its rank.
        store: The column store; None connects to the run's.
    """

    role = ""

    def __init__(self, run: RunHandle, rank: int = 0, store: ColumnStore | None = None) -> None:
        self._run, self._config, self._rank, self._given_store = run, run.config, rank, store
        self._model = run.config.model
        self._number = rank  # among the workers of its role
        self._directory = RunDirectory.of(run)
        self._incarnation = ""  # set by `_load`
        self._mesh: DeviceMesh | None = None
        self._offload = Offload({})
        start_tracing(run.run_id, run.config, f"{type(self).__name__}-{rank}")

    def incarnation(self) -> str:
        """Return the id of the process group that it belongs to; empty before it has weights."""
        return self._incarnation

    def prepare(self) -> None:
        """Do what takes one node longer than another, before the ranks wait for each other: a download, a new store.

        Raises:
            RunError: The model isn't the one that the run was given.
            ModelError: It can't be read.
        """
        take_all_files()  # each rank has two connections to each other one
        check_models(self._directory, [self._model.path])
        self._given_store or open_store(self._run)
        ModelFiles(self._model.path)

    def open_rendezvous(self, num_ranks: int) -> ProcessGroupHandle:
        """Host the rendezvous of `num_ranks` ranks, on this node's own address."""
        self._rendezvous = Rendezvous(ray.util.get_node_ip_address(), num_ranks)
        return self._rendezvous.group

    def sleep(self, parts: Collection[Part]) -> MemoryChange:
        """Move parts out of the device's memory, for as long as others need it; a call that uses them moves them in."""
        if self._incarnation:
            release_gathered(self._module)
        return self._offload.move_out(parts)

    def wake(self, parts: Collection[Part]) -> MemoryChange:
        """Move parts into the device's memory again.

        Raises:
            torch.OutOfMemoryError: It has too little.
        """
        return self._offload.move_in(parts)

    def _parts(self) -> dict[Part, Tensors]:
        """Return the parts that can be moved, with the tensors of each."""
        return {"weights": self._module.parameters}

    def _load(self, group: ProcessGroupHandle | None, *, trains: bool, shares_prompts: bool | None = None) -> None:
        """Join the other ranks, shard the model and load this rank's part; with None as `group`, this rank is alone."""
        set_threads(self._config.runtime.num_threads)
        device = choose_device()
        torch.manual_seed(self._config.seed)
        self._store: ColumnStore = self._given_store or open_store(self._run)
        mesh = self._join(group, device, self._config.runtime.num_policy_replicas if trains else 1)
        self._module, self._mesh = load_scoring_module(
            self._config, self._model, device, mesh, trains=trains, shares_prompts=shares_prompts
        )
        self._offload = Offload(self._parts())
        self._group_id = group.group_id if group else uuid.uuid4().hex
        dtype = self._model.dtype_on(device.type)
        self._telemetry = WorkerTelemetry(f"{self.role}-{self._number}", self._model, device, dtype)

    def _join(self, group: ProcessGroupHandle | None, device: torch.device, num_replicas: int) -> DeviceMesh | None:
        if group is None or group.num_ranks == 1:
            return None
        timeout = self._config.timeouts.collective_seconds
        mesh = join(group, self._rank, ray.util.get_node_ip_address(), device, timeout)
        return make_mesh(device.type, group.num_ranks, num_replicas) if num_replicas > 1 else mesh

    def _score(
        self,
        batch: BatchHandle,
        plan: ForwardPlan,
        column: str,
        stage: str,
        phase: str,
        *,
        inputs: tuple[str, ...] = TOKEN_COLUMNS,
        kl: bool = False,
        shard: int | None = None,
        top_k: int = 0,
    ) -> ScoreResult:
        """Put `column` (float32 nats, response axis): the log-probs of this rank's rows, from the columns `inputs`.

        The first of these are `TOKEN_COLUMNS`, or stand for them. `shard` is the number in the chunk's key (None: the
        rank); the `top_k` most likely tokens of each position are put as well, as `TOP_COLUMNS`; `kl` reports each
        row's KL from its behavior log-probs to these, by the config's estimator.
        """
        micros, rows = plan.rank(self._rank), rank_rows([plan], self._rank)
        if not len(rows) and self._mesh is None:
            return ScoreResult(put=None)
        mine = select(batch, rows)
        names = (*inputs, *(("loss_mask", "behavior_logprobs") if kl else ()), *layout_columns(batch.columns))
        columns = self._store.read(mine, names).rename_columns([*TOKEN_COLUMNS, *names[len(TOKEN_COLUMNS) :]])
        self.wake(["weights"])
        started = time.perf_counter()
        with self._collective(), profiled(self._run, batch.step, self._telemetry.worker, phase):
            values, top, top_ids = score_top(self._module, RankRows(rows, columns), micros, top_k)
        seconds = time.perf_counter() - started
        prompts, responses = (row_lengths(columns[name]) for name in TOKEN_COLUMNS)
        num_tokens = int((prompts + responses).sum())
        num_shared = num_tokens - sum(micro.num_tokens for micro in micros)
        telemetry = self._telemetry.throughput(
            phase, num_tokens, seconds, lambda work: work.forward(prompts, responses, num_shared=num_shared)
        )
        telemetry |= self._telemetry.memory()
        if not len(rows):
            return ScoreResult(put=None, telemetry=telemetry)
        found = {column: values}
        if top_k:
            found |= zip(
                TOP_COLUMNS, (top, top_ids.astype(token_dtype(num_embeddings(self._config.model)))), strict=True
            )
        stored = pa.record_batch({name: jagged(each, responses) for name, each in found.items()})
        key = ChunkKey(run_id=batch.run_id, step=batch.step, stage=stage, shard=self._rank if shard is None else shard)
        chunk = self._store.put(key, stored, mine)
        self._store.flush()
        put = PutResult(chunk=chunk, dtypes=value_dtypes(stored), traffic=self._store.take_traffic(stage))
        per_row = self._row_kl(columns, values) if kl else ()
        return ScoreResult(put=put, row_kl=per_row, telemetry=telemetry)

    def teacher_rows(self, batch: BatchHandle, teacher: str) -> TeacherRows:
        """Return which of a batch's rows a teacher scores, and the lengths of the prompts that it reads.

        Raises:
            ColumnError: The texts were left out, which tell the rows of several teachers apart.
        """
        distillation = self._config.distillation
        assert distillation is not None, "a run without teachers has no rows of theirs"
        rows = np.arange(batch.num_rows)
        if len(distillation.teachers) > 1 or distillation.teachers[teacher].data_sources:
            infos = self._store.read(batch, ["info"])["info"].to_pylist()
            if not all(infos):
                raise ColumnError(
                    f"step {batch.step} has no texts, so that the data sources of its rows, and with them their "
                    "teachers, aren't known; use a bundle with texts"
                )
            names = [distillation.teacher_of(json.loads(info)["data_source"]) for info in infos]
            rows = np.flatnonzero([name == teacher for name in names])
        if distillation.teachers[teacher].prompt is None or not len(rows):
            return TeacherRows(rows=encode_ints(rows), shares_prompts=self._module.shares_prompts)
        column = self._store.read(select(batch, rows), ["teacher_prompt_ids"])["teacher_prompt_ids"]
        lengths = row_lengths(column)
        return TeacherRows(
            rows=encode_ints(rows),
            prompt_lengths=encode_ints(lengths),
            prompts=encode_ints(number_prefixes(split_rows(column), lengths)),
            shares_prompts=self._module.shares_prompts,
        )

    def _score_teacher(self, batch: BatchHandle, plan: ForwardPlan, teacher: str) -> ScoreResult:
        """Put `teacher_logprobs`, and `TOP_COLUMNS`, of this rank's rows, which are all of one teacher."""
        distillation = self._config.distillation
        assert distillation is not None, "a run without teachers has nothing to score for them"
        teachers, top_k = distillation.teachers, distillation.top_k if distillation.reads_top else 0
        inputs = TOKEN_COLUMNS if teachers[teacher].prompt is None else ("teacher_prompt_ids", "response_ids")
        shard = list(teachers).index(teacher) + len(teachers) * self._rank
        return self._score(
            batch, plan, "teacher_logprobs", "teacher", "teacher", inputs=inputs, shard=shard, top_k=top_k
        )

    def _score_reference(self, batch: BatchHandle, plan: ForwardPlan) -> ScoreResult:
        """Put `reference_logprobs` of this rank's rows."""
        inputs, kl = (*TOKEN_COLUMNS, *mask_columns(self._config)), self._config.kl.in_reward
        return self._score(batch, plan, "reference_logprobs", "reference", "reference", inputs=inputs, kl=kl)

    def _row_kl(self, columns: pa.RecordBatch, reference: np.ndarray) -> tuple[float, ...]:
        return tuple(
            row_kl(
                self._config.kl.estimator,
                flat_values(columns["behavior_logprobs"]),
                reference,
                flat_values(columns["loss_mask"]),
                row_lengths(columns["response_ids"]),
            ).tolist()
        )

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Turn torch.distributed's errors about other ranks into `WorkerLostError`."""
        try:
            yield
        except PipelineError:
            raise
        except RuntimeError as error:
            if not is_peer_failure(error):
                raise
            raise WorkerLostError(f"rank {self._rank} lost the other ranks: {error}") from None


class FrozenWorker(ScoringWorker):
    """One rank of a model that only scores."""

    def start(self, group: ProcessGroupHandle | None = None) -> None:
        """Load the model's weights, once; see `PolicyWorker.start` for the arguments and errors."""
        if self._incarnation:
            return
        with self._collective():
            self._load(group, trains=False, shares_prompts=self._decide_sharing())
        self._incarnation = self._group_id

    def _decide_sharing(self) -> bool | None:
        """Return whether samples share prompts; None: as the config says."""
        return None


class ReferenceWorker(FrozenWorker):
    """One rank of the reference: the starting weights."""

    role = "reference"

    def score(self, batch: BatchHandle, plan: ForwardPlan) -> ScoreResult:
        """Put `reference_logprobs` of this rank's rows."""
        return self._score_reference(batch, plan)


class TeacherWorker(FrozenWorker):
    """One rank of a teacher.

    Args:
        run: The run it belongs to.
        number: Its number among the workers of all teachers.
        store: The column store; None connects to the run's.
    """

    role = "teacher"

    def __init__(self, run: RunHandle, number: int = 0, store: ColumnStore | None = None) -> None:
        (self._teacher, numbers), *_ = (each for each in teacher_workers(run.config).items() if number in each[1])
        super().__init__(run, number - numbers.start, store)
        self._number = number
        assert run.config.distillation is not None
        teacher = run.config.distillation.teachers[self._teacher]
        assert teacher.model is not None, "a teacher with workers has weights of its own"
        self._model = teacher.model
        prompt = run.config.data.max_prompt_tokens if teacher.prompt is None else teacher.max_prompt_tokens
        self._longest = prompt + run.config.rollout.max_response_tokens

    def _decide_sharing(self) -> bool | None:
        return shares_prompts(self._config, self._model, self._longest)

    def score(self, batch: BatchHandle, plan: ForwardPlan) -> ScoreResult:
        """Put `teacher_logprobs` of this rank's rows."""
        return self._score_teacher(batch, plan, self._teacher)
