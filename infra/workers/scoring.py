"""The base of policy and reference workers: a sharded model that scores its part of a batch's rows."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray
import torch
from torch.distributed.device_mesh import DeviceMesh

from infra.models.load import load_model, load_policy
from infra.ray.device import choose_device, set_threads
from infra.ray.rendezvous import Rendezvous, is_peer_failure, join
from infra.ray.tracing import start_tracing
from infra.storage.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.stores.open import open_store
from rl_core.columns.codec import value_dtypes
from rl_core.columns.jagged import flat_values, jagged, row_lengths
from rl_core.losses.kl import row_kl
from rl_core.planning.rows import rank_rows
from rl_core.training import RankRows, ScoringModule, score_rows, shard
from rl_core.training.rows import TOKEN_COLUMNS
from rl_core.views import select
from schemas.batch import BatchHandle, ChunkKey
from schemas.config.model import ModelConfig
from schemas.errors import PipelineError, WorkerLostError
from schemas.plan import ForwardPlan
from schemas.rollout import PutResult
from schemas.step import ProcessGroupHandle, RunHandle, ScoreResult


class ScoringWorker:
    """One rank of a model that computes log-probs of stored rows.

    Args:
        run: The run it belongs to.
        rank: Its rank.
        store: The column store; None connects to the run's.
    """

    def __init__(self, run: RunHandle, rank: int = 0, store: ColumnStore | None = None) -> None:
        self._run, self._config, self._rank, self._given_store = run, run.config, rank, store
        self._directory = RunDirectory(Path(run.directory))
        self._incarnation = ""  # set by `_load`
        self._mesh: DeviceMesh | None = None
        start_tracing(run.run_id, run.config, f"{type(self).__name__}-{rank}")

    def incarnation(self) -> str:
        """Return the id of the process group that it belongs to; empty before it has weights."""
        return self._incarnation

    def open_rendezvous(self, num_ranks: int) -> ProcessGroupHandle:
        """Host the rendezvous of `num_ranks` ranks, on this node's own address."""
        host = ray.util.get_node_ip_address()
        self._rendezvous = Rendezvous(host, num_ranks)  # it must outlive the group
        return ProcessGroupHandle(group_id=uuid.uuid4().hex, host=host, port=self._rendezvous.port, num_ranks=num_ranks)

    def _load(self, model: ModelConfig, group: ProcessGroupHandle | None, *, trains: bool) -> None:
        """Join the other ranks, and load and shard the model; with None as `group`, this rank is alone."""
        set_threads(self._config.runtime.num_threads)
        device = choose_device()
        torch.manual_seed(self._config.seed)
        self._store: ColumnStore = self._given_store or open_store(self._run)
        loaded = load_policy(model, self._config.seed) if trains else load_model(model).requires_grad_(False)
        loaded.to(device)  # type: ignore[arg-type]  # its decorator hides that a device is accepted
        module = ScoringModule(loaded, model, self._config.packing, self._config.rollout.temperature)
        module.probe()
        if group is not None and group.num_ranks > 1:
            timeout = self._config.runtime.collective_timeout_seconds
            self._mesh = join(group, self._rank, ray.util.get_node_ip_address(), device, timeout)
            shard(module, loaded, self._mesh)
        self._module = module
        self._group_id = group.group_id if group else uuid.uuid4().hex

    def _score(
        self, batch: BatchHandle, plan: ForwardPlan, column: str, stage: str, *, kl: bool = False
    ) -> ScoreResult:
        """Put `column` (float32 nats, response axis): the log-probs of this rank's rows.

        Args:
            batch: The step's rows.
            plan: The assignment of rows to ranks.
            column: The column's name.
            stage: The stage's name in the chunk's key.
            kl: Whether to report each row's KL from its behavior log-probs to these, by the config's estimator.
        """
        micros, rows = plan.ranks[self._rank], rank_rows(plan.ranks[self._rank])
        if not len(rows) and self._mesh is None:
            return ScoreResult(put=None)
        mine = select(batch, rows)
        names = (*TOKEN_COLUMNS, "loss_mask", "behavior_logprobs") if kl else TOKEN_COLUMNS
        columns = self._store.read(mine, names)
        with self._collective():
            values = score_rows(self._module, RankRows(rows, columns), micros)
        if not len(rows):
            return ScoreResult(put=None)
        stored = pa.record_batch({column: jagged(values, row_lengths(columns["response_ids"]))})
        key = ChunkKey(run_id=batch.run_id, step=batch.step, stage=stage, shard=self._rank)
        chunk = self._store.put(key, stored, mine)
        self._store.flush()
        put = PutResult(chunk=chunk, dtypes=value_dtypes(stored), traffic=self._store.take_traffic(stage))
        per_row = self._row_kl(columns, values) if kl else ()
        return ScoreResult(put=put, row_kl=per_row)

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
