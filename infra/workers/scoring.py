"""The base of policy and reference workers: a sharded model that scores its part of a batch's rows."""

import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import ray
import torch
from torch.distributed.device_mesh import DeviceMesh

from infra.models.scoring import load_scoring_module
from infra.ray.device import choose_device, set_threads
from infra.ray.rendezvous import Rendezvous, is_peer_failure, join
from infra.ray.tracing import start_tracing
from infra.storage.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.stores.open import open_store
from infra.workers.offload import Offload, Tensors
from infra.workers.telemetry import WorkerTelemetry, profiled
from rl_core.columns.codec import value_dtypes
from rl_core.columns.jagged import flat_values, jagged, row_lengths
from rl_core.losses.kl import row_kl
from rl_core.planning.plan import rank_rows
from rl_core.training import RankRows, score_rows
from rl_core.training.rows import TOKEN_COLUMNS
from rl_core.training.sharding import make_mesh, release_gathered
from rl_core.views import select
from schemas.batch import BatchHandle, ChunkKey
from schemas.config.model import ModelConfig
from schemas.errors import PipelineError, WorkerLostError
from schemas.placement import MemoryChange, Part
from schemas.plan import ForwardPlan
from schemas.rollout import PutResult
from schemas.step import ProcessGroupHandle, RunHandle, ScoreResult


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
        self._directory = RunDirectory.of(run)
        self._incarnation = ""  # set by `_load`
        self._mesh: DeviceMesh | None = None
        self._offload = Offload({})
        start_tracing(run.run_id, run.config, f"{type(self).__name__}-{rank}")

    def incarnation(self) -> str:
        """Return the id of the process group that it belongs to; empty before it has weights."""
        return self._incarnation

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

    def _load(self, model: ModelConfig, group: ProcessGroupHandle | None, *, trains: bool) -> None:
        """Join the other ranks, shard the model and load this rank's part; with None as `group`, this rank is alone."""
        set_threads(self._config.runtime.num_threads)
        device = choose_device()
        torch.manual_seed(self._config.seed)
        self._store: ColumnStore = self._given_store or open_store(self._run)
        mesh = self._join(group, device, self._config.runtime.num_policy_replicas if trains else 1)
        self._module, self._mesh = load_scoring_module(self._config, model, device, mesh, trains=trains)
        self._offload = Offload(self._parts())
        self._group_id = group.group_id if group else uuid.uuid4().hex
        self._telemetry = WorkerTelemetry(f"{self.role}-{self._rank}", model, device, model.dtype_on(device.type))

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
    ) -> ScoreResult:
        """Put `column` (float32 nats, response axis): the log-probs of this rank's rows.

        Args:
            batch: The step's rows.
            plan: The assignment of rows to ranks.
            column: The column's name.
            stage: The stage's name in the chunk's key.
            phase: The step's phase that it is, in measurements and traces.
            inputs: The columns that it is computed from.
            kl: Whether to report each row's KL from its behavior log-probs to these, by the config's estimator.
        """
        micros, rows = plan.rank(self._rank), rank_rows([plan], self._rank)
        if not len(rows) and self._mesh is None:
            return ScoreResult(put=None)
        mine = select(batch, rows)
        names = (*inputs, "loss_mask", "behavior_logprobs") if kl else inputs
        columns = self._store.read(mine, names)
        self.wake(["weights"])
        started = time.perf_counter()
        with self._collective(), profiled(self._run, batch.step, self._telemetry.worker, phase):
            values = score_rows(self._module, RankRows(rows, columns), micros)
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
        stored = pa.record_batch({column: jagged(values, row_lengths(columns["response_ids"]))})
        key = ChunkKey(run_id=batch.run_id, step=batch.step, stage=stage, shard=self._rank)
        chunk = self._store.put(key, stored, mine)
        self._store.flush()
        put = PutResult(chunk=chunk, dtypes=value_dtypes(stored), traffic=self._store.take_traffic(stage))
        per_row = self._row_kl(columns, values) if kl else ()
        return ScoreResult(put=put, row_kl=per_row, telemetry=telemetry)

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
        """Turn torch.distributed's errors about other ranks into `WorkerLostError`.

        Raises:
            WorkerLostError: Another rank is gone, or did not take part in time.
        """
        try:
            yield
        except PipelineError:
            raise
        except RuntimeError as error:
            if not is_peer_failure(error):
                raise
            raise WorkerLostError(f"rank {self._rank} lost the other ranks: {error}") from None


class ReferenceWorker(ScoringWorker):
    """One rank of the reference."""

    role = "reference"

    def start(self, group: ProcessGroupHandle | None = None) -> None:
        """Load the starting weights, once; see `PolicyWorker.start` for the arguments and errors."""
        if self._incarnation:
            return
        with self._collective():
            self._load(self._config.model, group, trains=False)
        self._incarnation = self._group_id

    def score(self, batch: BatchHandle, plan: ForwardPlan) -> ScoreResult:
        """Put `reference_logprobs` of this rank's rows."""
        return self._score(batch, plan, "reference_logprobs", "reference", "reference", kl=self._config.kl.in_reward)
