"""The policy worker: holds the live weights and the optimizer, and is the only one that changes them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from operator import add

import numpy as np
import pyarrow as pa
import ray
import torch.distributed as dist
from torch import Tensor

from infra.checkpoints.retention import best_version
from infra.checkpoints.state import copy_trained, policy_tensors, restore_policy, swapped_weights
from infra.checkpoints.store import PendingCheckpoint, open_checkpoints
from infra.models.load import describe_adapter, save_assets
from infra.models.lora import adapter_disabled, merged_weights
from infra.weights.endpoint import WeightSyncEndpoint
from infra.weights.layout import join_gather, tensor_specs
from infra.workers.scoring import ScoringWorker
from rl_core.planning.rows import rank_rows
from rl_core.training import RankRows, Trainer, training_columns
from rl_core.training.sharding import full_tensor, gather
from rl_core.views import select
from schemas.batch import BatchHandle
from schemas.errors import NonFiniteError, VersionError
from schemas.metrics import merge_metrics
from schemas.plan import ForwardPlan, StepPlan
from schemas.step import EvalReport, PolicyHandle, ProcessGroupHandle, ScoreResult, UpdateReport
from schemas.weights import SentWeights, Transport, WeightGroupMember


class PolicyWorker(ScoringWorker):
    """One rank of the policy. All ranks are called alike."""

    _version = 0
    _complete_version: int | None = None  # of the newest complete checkpoint
    _report: UpdateReport | None = None
    _pending: PendingCheckpoint | None = None
    _previous: dict[str, Tensor] | None = None  # the trained weights of the version before, where they may be wanted

    def start(self, group: ProcessGroupHandle | None = None) -> PolicyHandle:
        """Load the newest checkpoint, else the starting weights. A worker that has weights keeps them.

        Args:
            group: Where the ranks meet; None is one rank alone.

        Raises:
            ScoringError: Packed sequences would see each other under this model.
            WorkerLostError: The other ranks didn't come.
        """
        if self._incarnation:
            return self.handle()
        with self._collective():
            self._load(self._config.model, group, trains=True)
            self._trainer = Trainer(self._module, self._config, self._mesh)
            self._restore()
            self._saving = dist.new_group(backend="gloo") if self._mesh is not None else None
        timeout = self._config.runtime.collective_timeout_seconds
        self._weight_sync = WeightSyncEndpoint(self._run.run_id, self._module.model.device, timeout)
        self._incarnation = self._group_id
        return self.handle()

    def handle(self) -> PolicyHandle:
        """The version it holds."""
        return PolicyHandle(run_id=self._run.run_id, version=self._version, incarnation=self._incarnation)

    def score(self, batch: BatchHandle, plan: ForwardPlan, version: int) -> ScoreResult:
        """Put `behavior_logprobs`: the trainer's own log-probs under the weights that sampled.

        Raises:
            VersionError: It no longer holds `version`.
        """
        self._require_version(version)
        return self._score(batch, plan, "behavior_logprobs", "behavior")

    def score_reference(self, batch: BatchHandle, plan: ForwardPlan) -> ScoreResult:
        """Put `reference_logprobs`: those of the policy without its adapter."""
        with adapter_disabled(self._module.model):
            return self._score(batch, plan, "reference_logprobs", "reference", kl=self._config.kl.in_reward)

    def update(self, batch: BatchHandle, plan: StepPlan, version: int) -> UpdateReport:
        """Apply the plan's updates to `version`, exactly once; asked again, answer with the recorded report.

        Raises:
            VersionError: It holds neither `version` nor the one that this update leads to.
            NonFiniteError: A loss or gradient is not finite. The weights are as before that optimizer step, the rows
                to blame are written to the run's `non_finite/`, and the worker holds no version until it is started.
        """
        if self._version == version + 1 and self._report is not None:
            return self._report
        self._require_version(version)
        rows = rank_rows([micro for update in plan.updates for micro in update.ranks[self._rank]])
        mine = RankRows(rows, self._store.read(select(batch, rows), training_columns(self._config)))
        incarnation, self._incarnation = self._incarnation, ""  # not usable until all updates are in
        self._previous = copy_trained(self._module.model) if self._config.runtime.max_staleness else None
        try:
            with self._collective():
                parts = [self._trainer.update(mine, update, self._rank) for update in plan.updates]
                everyone = gather((merge_metrics(parts), self._store.take_traffic("update")), self._mesh)
        except NonFiniteError as error:
            raise self._with_saved_rows(error, mine, batch.step) from None
        self._version, self._incarnation = version + 1, incarnation
        metrics, traffic = zip(*everyone, strict=True)
        self._report = UpdateReport(policy=self.handle(), metrics=merge_metrics(metrics), traffic=reduce(add, traffic))
        return self._report

    @ray.method(num_returns=2)
    def send_weights(self, version: int, transport: Transport, owner: bytes) -> tuple[bytes, SentWeights | None]:
        """Send the parameters of `version`, adapters merged: the first rank does, the others take part in gathering.

        Where steps may be sampled by the version before, that one is sent, too.

        Args:
            version: The version.
            transport: By which it travels.
            owner: The `object_store.address()` of the caller.

        Raises:
            VersionError: It holds another version.
            WeightsError: There is no room for them.
        """
        with self._collective(), self.weights(version) as weights:
            tensors = ((name, full_tensor(tensor)) for name, tensor in weights.items())
            if self._rank == 0:
                return self._weight_sync.sender(transport).send(version, tensor_specs(weights), tensors, owner)
            join_gather(tensors)
        return b"", None

    @contextmanager
    def weights(self, version: int) -> Iterator[dict[str, Tensor]]:
        """The parameters of `version`, adapters merged, sharded as they are: not copies, and only for the while.

        Raises:
            VersionError: It holds another version, and not that one as the one before.
        """
        if self._previous is None or version != self._version - 1:
            self._require_version(version)
            yield merged_weights(self._module.model)
        else:
            with swapped_weights(self._module.model, self._previous):
                yield merged_weights(self._module.model)

    def weight_group_member(self) -> WeightGroupMember:
        """Where it computes, and in which group it broadcasts weights."""
        return self._weight_sync.member()

    def open_weight_rendezvous(self, num_receivers: int) -> ProcessGroupHandle:
        """Host the gathering of a group that broadcasts weights."""
        return self._weight_sync.open_rendezvous(num_receivers)

    def init_weight_group(self, meeting: ProcessGroupHandle, rank: int) -> None:
        """Join such a group; the sender is its rank 0."""
        self._weight_sync.join(meeting, rank)

    def save(self, version: int) -> None:
        """Begin to write the checkpoint of `version`, unless it is there; the one before is complete then.

        Raises:
            VersionError: It holds another version.
            CheckpointError: The one before, or this one, could not be written.
        """
        self._require_version(version)
        self.finish_saving()
        if version == self._complete_version:
            return
        with self._collective():
            self._pending = self._checkpoints.save(
                version,
                policy_tensors(self._module.model, self._trainer.optimizer, self._previous),
                num_updates=self._trainer.num_updates,
                report=self._report,
                adapter=describe_adapter(self._config.model),
                write_assets=partial(save_assets, self._config.model),
                process_group=self._saving,
            )

    def finish_saving(self) -> None:
        """Wait until what `save` began is complete.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with self._collective():
            pending.wait()
        self._complete_version = pending.version

    def retain(self, evals: Sequence[EvalReport]) -> int | None:
        """Drop the checkpoints that the config doesn't keep; returns the newest complete version.

        Args:
            evals: Of all versions so far: the best one's checkpoint may be kept.
        """
        complete = self._checkpoints.complete_versions()
        if not complete:
            return None
        config = self._config.checkpoint
        self._checkpoints.retain(config.keep_last, best_version(evals, complete) if config.keep_best else None)
        return complete[-1]

    def _restore(self) -> None:
        """Take the newest complete checkpoint's weights; all ranks take that of rank 0."""
        self._checkpoints = open_checkpoints(self._directory, self._config.checkpoint)
        found = self._checkpoints.newest() if self._rank == 0 else None
        newest = gather(found, self._mesh)[0]
        self._complete_version = newest[0] if newest else None
        if newest is None:
            self._version, self._report = 0, None
            return
        self._version, manifest = newest
        model = self._module.model
        self._previous = copy_trained(model) if self._config.runtime.max_staleness and self._version else None
        restore_policy(self._checkpoints, self._version, model, self._trainer.optimizer, self._previous)
        self._trainer.num_updates, self._report = manifest.num_updates, manifest.report

    def _with_saved_rows(self, error: NonFiniteError, rows: RankRows, step: int) -> NonFiniteError:
        """Keep the columns of the rows to blame for people to look at, and say where they are."""
        if not error.rows:
            return error
        folder = self._directory.path / "non_finite"
        folder.mkdir(exist_ok=True)
        if len(mine := np.intersect1d(error.rows, rows.rows)):
            path = folder / f"step-{step:06d}-rank-{self._rank}.arrow"
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.columns.schema) as writer:
                writer.write(rows.take(mine))
        return NonFiniteError(f"{error}; their columns are in {folder}", error.rows)

    def _require_version(self, version: int) -> None:
        if not self._incarnation:
            raise VersionError("the policy worker holds no whole version: an update failed in it; start it again")
        if self._version != version:
            raise VersionError(f"the policy worker holds version {self._version}, not the expected {version}")
