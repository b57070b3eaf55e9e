"""The policy worker: holds the live weights and the optimizer, and is the only worker that changes them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add

import numpy as np
import pyarrow as pa
import torch.distributed as dist
from torch import Tensor

from infra.checkpoints import open_checkpoints
from infra.checkpoints.state import copy_trained, policy_tensors, restore_policy, swapped_weights
from infra.models.lora import adapter_disabled, merged_weights
from infra.ray.tracing import traced
from infra.weights.endpoint import WeightSyncEndpoint
from infra.weights.layout import join_gather, tensor_specs
from infra.workers.policy_checkpoints import PolicyCheckpoints
from infra.workers.scoring import ScoringWorker
from rl_core.planning.rows import rank_rows
from rl_core.training import RankRows, Trainer, training_columns
from rl_core.training.sharding import all_gather_object, full_tensor
from rl_core.views import select
from schemas.batch import BatchHandle
from schemas.errors import NonFiniteError, VersionError
from schemas.metrics import merge_metrics
from schemas.plan import ForwardPlan, StepPlan
from schemas.step import EvalReport, PolicyHandle, ProcessGroupHandle, ScoreResult, UpdateReport
from schemas.weights import SentWeights, Transport, WeightGroupMember, WeightsFile


class PolicyWorker(ScoringWorker):
    """One rank of the policy. All ranks receive the same calls."""

    _version = 0
    _report: UpdateReport | None = None
    _previous: dict[str, Tensor] | None = None  # the previous version's trained weights, if it may still sample

    def start(self, group: ProcessGroupHandle | None = None) -> PolicyHandle:
        """Load the newest checkpoint, or the starting weights if none exists. A worker that has weights keeps them.

        Args:
            group: The ranks' process group; None for a single rank.

        Raises:
            ScoringError: Packed sequences would attend to each other under this model.
            WorkerLostError: The other ranks didn't join in time.
        """
        if self._incarnation:
            return self.handle()
        with self._collective():
            self._load(self._config.model, group, trains=True)
            self._trainer = Trainer(self._module, self._config, self._mesh)
            store = open_checkpoints(self._directory, self._config.checkpoint)
            saving = dist.new_group(backend="gloo") if self._mesh is not None else None
            self._checkpoints = PolicyCheckpoints(self._config, store, self._rank, self._mesh, saving)
            self._restore()
        device = self._module.model.device
        self._weight_sync = WeightSyncEndpoint(self._run.run_id, device, self._config.runtime)
        self._incarnation = self._group_id
        return self.handle()

    def handle(self) -> PolicyHandle:
        """Return the handle of the version it holds."""
        return PolicyHandle(run_id=self._run.run_id, version=self._version, incarnation=self._incarnation)

    def score(self, batch: BatchHandle, plan: ForwardPlan, version: int) -> ScoreResult:
        """Put `behavior_logprobs`: the trainer's own log-probs, before the step's update.

        Raises:
            VersionError: The worker no longer holds `version`.
        """
        self._check_version(version)
        return self._score(batch, plan, "behavior_logprobs", "behavior")

    def score_reference(self, batch: BatchHandle, plan: ForwardPlan) -> ScoreResult:
        """Put `reference_logprobs`: the log-probs of the policy without its adapter."""
        with adapter_disabled(self._module.model):
            return self._score(batch, plan, "reference_logprobs", "reference", kl=self._config.kl.in_reward)

    @traced("rl.train")
    def update(self, batch: BatchHandle, plan: StepPlan, version: int) -> UpdateReport:
        """Apply the plan's updates to `version`, exactly once; a repeated call returns the recorded report.

        Raises:
            VersionError: The worker holds neither `version` nor the version that this update produces.
            NonFiniteError: A loss or gradient is not finite. The weights are as before that optimizer step, the
                offending rows are written to the run's `non_finite/`, and the worker holds no version until restarted.
        """
        if self._version == version + 1 and self._report is not None:
            return self._report
        self._check_version(version)
        rows = rank_rows([micro for update in plan.updates for micro in update.ranks[self._rank]])
        mine = RankRows(rows, self._store.read(select(batch, rows), training_columns(self._config)))
        incarnation, self._incarnation = self._incarnation, ""  # unusable until all updates are applied
        self._previous = copy_trained(self._module.model) if self._config.runtime.max_staleness else None
        try:
            with self._collective():
                parts = [self._trainer.update(mine, update, self._rank, plan.lr_scale) for update in plan.updates]
                gathered = all_gather_object((merge_metrics(parts), self._store.take_traffic("update")), self._mesh)
        except NonFiniteError as error:
            raise self._with_offending_rows(error, mine, batch.step) from None
        self._version, self._incarnation = version + 1, incarnation
        metrics, traffic = zip(*gathered, strict=True)
        self._report = UpdateReport(policy=self.handle(), metrics=merge_metrics(metrics), traffic=reduce(add, traffic))
        return self._report

    @traced("rl.sync")
    def send_weights(self, version: int, transport: Transport) -> SentWeights | None:
        """Send the parameters of `version`, adapters merged: rank 0 sends, the other ranks take part in gathering.

        If the previous version may still sample, it can be sent as well.

        Args:
            version: The version.
            transport: The transport to send by.

        Raises:
            VersionError: The worker holds another version.
            WeightsError: No space is left for them.
        """
        with self._collective(), self.weights(version) as weights:
            tensors = ((name, full_tensor(tensor)) for name, tensor in weights.items())
            if self._rank == 0:
                return self._weight_sync.sender(transport).send(version, tensor_specs(weights), tensors)
            join_gather(tensors)
        return None

    def read_weights(self, file: WeightsFile, start: int, stop: int) -> bytes:
        """Return a part of weights that were sent, for a rollout worker on another node."""
        return self._weight_sync.file_sender.read(file, start, stop)

    def drop_sent_weights(self, file: WeightsFile) -> None:
        """Free weights that were sent: the rollout workers have loaded them."""
        self._weight_sync.file_sender.drop(file)

    @contextmanager
    def weights(self, version: int) -> Iterator[dict[str, Tensor]]:
        """Hold the parameters of `version`, adapters merged, sharded: not copies, valid within the block only.

        Raises:
            VersionError: `version` is neither the current one nor the previous one if that was kept.
        """
        if self._previous is None or version != self._version - 1:
            self._check_version(version)
            yield merged_weights(self._module.model)
        else:
            with swapped_weights(self._module.model, self._previous):
                yield merged_weights(self._module.model)

    def weight_group_member(self) -> WeightGroupMember:
        """Return its GPU and the weight group that it is in."""
        return self._weight_sync.member()

    def open_weight_rendezvous(self, num_receivers: int) -> ProcessGroupHandle:
        """Host the rendezvous of a new weight group."""
        return self._weight_sync.open_rendezvous(num_receivers)

    def init_weight_group(self, group: ProcessGroupHandle, rank: int) -> None:
        """Join a weight group; the sender has rank 0."""
        self._weight_sync.join(group, rank)

    def save(self, version: int) -> None:
        """Begin to write the checkpoint of `version` unless it exists; see `PolicyCheckpoints.save`.

        Raises:
            VersionError: The worker holds another version.
            CheckpointError: The previous checkpoint, or this one, could not be written.
        """
        self._check_version(version)
        with self._collective():
            tensors = policy_tensors(self._module.model, self._trainer.optimizer, self._previous)
            self._checkpoints.save(version, tensors, num_updates=self._trainer.num_updates, report=self._report)

    def finish_saving(self) -> None:
        """Wait until the checkpoint that `save` began is complete.

        Raises:
            CheckpointError: It could not be written.
        """
        with self._collective():
            self._checkpoints.finish_saving()

    def retain(self, evals: Sequence[EvalReport]) -> int | None:
        """Remove the checkpoints that the config doesn't keep; see `PolicyCheckpoints.retain`."""
        return self._checkpoints.retain(evals)

    def _restore(self) -> None:
        """Restore the newest complete checkpoint, if one exists."""
        newest = self._checkpoints.find_newest()
        if newest is None:
            self._version, self._report = 0, None
            return
        self._version, manifest = newest
        model = self._module.model
        self._previous = copy_trained(model) if self._config.runtime.max_staleness and self._version else None
        restore_policy(self._checkpoints.store, self._version, model, self._trainer.optimizer, self._previous)
        self._trainer.num_updates, self._report = manifest.num_updates, manifest.report

    def _with_offending_rows(self, error: NonFiniteError, rows: RankRows, step: int) -> NonFiniteError:
        """Write this rank's offending rows to the run directory, and return the error with the folder's path added."""
        if not error.rows:
            return error
        folder = self._directory.path / "non_finite"
        folder.mkdir(exist_ok=True)
        if len(mine := np.intersect1d(error.rows, rows.rows)):
            path = folder / f"step-{step:06d}-rank-{self._rank}.arrow"
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.columns.schema) as writer:
                writer.write(rows.take(mine))
        return NonFiniteError(f"{error}; their columns are in {folder}", error.rows)

    def _check_version(self, version: int) -> None:
        if not self._incarnation:
            raise VersionError("the policy worker holds no complete version: an update failed in it; restart it")
        if self._version != version:
            raise VersionError(f"the policy worker holds version {self._version}, not the expected {version}")
