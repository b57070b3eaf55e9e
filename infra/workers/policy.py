"""The policy worker: holds the live weights and the optimizer, and is the only worker that changes them.

Its ranks restore and save checkpoints together.
"""

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial, reduce
from operator import add
from typing import TypeVar

import numpy as np
import pyarrow as pa
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from infra.checkpoints import CheckpointStore, Manifest, PendingCheckpoint, best_version, open_checkpoints
from infra.checkpoints.state import copy_trained, policy_tensors, restore_policy, swapped_weights
from infra.models.assets import save_assets
from infra.models.load import describe_adapter
from infra.models.lora import adapter_disabled, published_weights
from infra.ray.tracing import traced
from infra.storage.lineage import load_fork
from infra.weights.buckets import changing_weights, gathered, join_gather, sent_specs
from infra.weights.endpoint import WeightSyncEndpoint
from infra.weights.probe import score_probe
from infra.workers.scoring import ScoringWorker
from infra.workers.telemetry import profiled
from rl_core.columns.jagged import PREFIX_COLUMN, as_tensor, row_lengths
from rl_core.planning.plan import rank_rows
from rl_core.storages import Tensors, storage_bytes
from rl_core.telemetry import micro_batch_seconds
from rl_core.training import RankRows, Trainer, policy_columns, training_columns
from rl_core.training.optimizer import moments_of
from rl_core.training.rows import TOKEN_COLUMNS, layout_columns
from rl_core.training.sharding import all_gather_object
from rl_core.views import select
from schemas.batch import BatchHandle
from schemas.config.run import RunConfig
from schemas.errors import CheckpointError, NonFiniteError, VersionError
from schemas.metrics import Metrics, merge_metrics
from schemas.placement import MemoryChange, Part
from schemas.plan import ForwardPlan, StepPlan
from schemas.step import EvalReport, PolicyHandle, ProcessGroupHandle, ScoreResult, UpdateReport
from schemas.weights import ProbeRow, SentWeights, WeightGroupMember, WeightsRoute

# For ranks that are slow to read or write their part of a checkpoint; one that is gone is noticed at once.
_FILES_TIMEOUT = timedelta(hours=12)

Value = TypeVar("Value")


class PolicyCheckpoints:
    """One rank's part in a policy's checkpoints. All ranks make the same calls, except for `retain`.

    Args:
        config: The run's configuration.
        store: The run's checkpoints.
        rank: This rank.
        mesh: All ranks; None for a single one.
        process_group: A gloo group of all ranks that nothing else uses; None for a single one.

    Attributes:
        store: The run's checkpoints.
        num_begun: How many this rank has begun to save.
    """

    def __init__(
        self,
        config: RunConfig,
        store: CheckpointStore,
        rank: int,
        mesh: DeviceMesh | None,
        process_group: ProcessGroup | None,
    ) -> None:
        self.store = store
        self._config, self._rank, self._mesh, self._process_group = config, rank, mesh, process_group
        self._adapter = describe_adapter(config.model)  # of what was loaded: a link in the path may be moved
        self.num_begun = 0
        self._pending: PendingCheckpoint | None = None
        self._complete_version: int | None = None  # of the newest complete checkpoint that this rank knows of

    def find_newest(self) -> tuple[int, Manifest] | None:
        """Return the newest complete checkpoint's version and manifest; None if none exists. Reads all of its bytes.

        Each rank reads a part of the files. A warning says what is wrong with one that is unfinished or damaged.
        """
        versions, level = self._gather(self.store.versions())[0], logging.WARNING if self._rank == 0 else logging.DEBUG
        newest = next(self.store.undamaged(versions, self._verify, level), None)
        self._complete_version = newest[0] if newest else None
        return newest

    def _verify(self, version: int) -> Manifest:
        """Check this rank's part of a checkpoint's files; every rank raises the first one's fault."""
        try:
            manifest, fault = self.store.verify(version, self._rank, 1 if self._mesh is None else self._mesh.size()), ""
        except CheckpointError as error:
            manifest, fault = None, str(error)
        faults = [each for each in self._gather(fault) if each]
        if manifest is None or faults:
            raise CheckpointError(faults[0])
        return manifest

    def _gather(self, value: Value) -> list[Value]:
        return all_gather_object(value, self._mesh, self._process_group)

    def save(
        self, version: int, tensors: Mapping[str, Tensor], *, num_updates: int, report: UpdateReport | None
    ) -> None:
        """Complete the previous checkpoint, then begin to write that of `version` unless it exists.

        Args:
            version: The policy version.
            tensors: What `infra.checkpoints.state.policy_tensors` returns.
            num_updates: The number of optimizer steps so far.
            report: The report of the step that produced this version.

        Raises:
            CheckpointError: The previous checkpoint, or this one, could not be written.
        """
        self.finish_saving()
        if version == self._complete_version:
            return
        self.num_begun += 1
        self._pending = self.store.save(
            version,
            tensors,
            num_updates=num_updates,
            report=report,
            adapter=self._adapter,
            write_assets=partial(save_assets, self._config.model),
            process_group=self._process_group,
        )

    def finish_saving(self) -> None:
        """Wait until the checkpoint that `save` began is complete.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.wait()
        self._complete_version = pending.version

    def retain(self, evals: Sequence[EvalReport], first: int | None = None) -> int | None:
        """Remove the checkpoints that the config doesn't keep, and return the newest complete version; for rank 0 only.

        A newer one that this rank has neither loaded nor saved doesn't count: it is damaged, or another group's.

        Args:
            evals: The reports of all versions evaluated so far: the best version's checkpoint may be kept.
            first: A version that is kept.
        """
        pending = self._pending
        newest = pending.version if pending is not None and pending.is_complete else self._complete_version
        if newest is None:
            return None
        complete = [version for version in self.store.complete_versions() if version <= newest]
        config = self._config.checkpoint
        best = best_version(evals, complete) if config.keep_best else None
        self.store.retain(newest, config.keep_last, best, first)
        return newest


class PolicyWorker(ScoringWorker):
    """One rank of the policy. All ranks receive the same calls."""

    role = "policy"

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
            self._load(group, trains=True)
            self._trainer = Trainer(self._module, self._config, self._mesh)
            store = open_checkpoints(self._directory, self._config.checkpoint)
            group = dist.new_group(backend="gloo", timeout=_FILES_TIMEOUT) if self._mesh is not None else None
            self._checkpoints = PolicyCheckpoints(self._config, store, self._rank, self._mesh, group)
            self._restore()
        device = self._module.model.device
        self._weight_sync = WeightSyncEndpoint(self._run.run_id, device, self._config)
        self._incarnation = self._group_id
        return self.handle()

    def incarnation(self) -> str:
        """Return the id of its process group, with the number of checkpoints that it has begun to save.

        A driver that was killed may have told only some ranks to save one, for which they wait for the others.
        """
        return f"{self._incarnation}-{self._checkpoints.num_begun}" if self._incarnation else ""

    def handle(self) -> PolicyHandle:
        """Return the handle of the version it holds."""
        return PolicyHandle(run_id=self._run.run_id, version=self._version, incarnation=self._incarnation)

    def score(self, batch: BatchHandle, plan: ForwardPlan, version: int, stage: str = "behavior") -> ScoreResult:
        """Put `behavior_logprobs`: the trainer's own log-probs, before the step's update.

        Args:
            batch: The step's rows.
            plan: The assignment of rows to ranks.
            version: The version that it holds.
            stage: The stage's name in the chunks' keys; a replay scores the same rows with several versions.

        Raises:
            VersionError: The worker no longer holds `version`.
        """
        self._check_version(version)
        inputs = policy_columns(self._config)
        return self._score(batch, plan, "behavior_logprobs", stage, "logprob", inputs=inputs)

    def score_reference(self, batch: BatchHandle, plan: ForwardPlan) -> ScoreResult:
        """Put `reference_logprobs`: the log-probs of the policy without its adapter."""
        with adapter_disabled(self._module.model):
            return self._score_reference(batch, plan)

    def score_teacher(self, batch: BatchHandle, plan: ForwardPlan, teacher: str, version: int) -> ScoreResult:
        """Put `teacher_logprobs` of a teacher that is the policy itself with another prompt, at `version`.

        Raises:
            VersionError: The worker no longer holds `version`.
        """
        self._check_version(version)
        return self._score_teacher(batch, plan, teacher)

    @traced("rl.train")
    def update(self, batch: BatchHandle, plan: StepPlan, version: int) -> UpdateReport | None:
        """Apply the plan's updates to `version`, exactly once; a repeated call returns the recorded report.

        Returns:
            The report of all ranks, from rank 0; None from the others.

        Raises:
            VersionError: The worker holds neither `version` nor the version that this update produces.
            NonFiniteError: A loss or gradient is not finite. The weights are as before that optimizer step, the
                offending rows are written to the run's `non_finite/`, and the worker holds no version until restarted.
        """
        if self._version != version + 1 or self._report is None:
            self._update(batch, plan, version)
        return self._report if self._rank == 0 else None

    def sleep(self, parts: Collection[Part]) -> MemoryChange:
        """Move parts to host memory, and drop gradients, which each update computes; see `ScoringWorker.sleep`."""
        dropped: dict[Part, int] = {}
        if "gradients" in parts and self._incarnation:
            gradients = (weight.grad for weight in self._module.parameters())
            dropped["gradients"] = storage_bytes(gradient for gradient in gradients if gradient is not None)
            self._trainer.optimizer.zero_grad(set_to_none=True)
        return super().sleep(parts).replace(freed=dropped)

    def _parts(self) -> dict[Part, Tensors]:
        """Return the weights, and the moments unless the optimizer itself keeps them in host memory."""
        parts = super()._parts()
        return parts if self._config.optim.offload else parts | {"optimizer": self._moments}

    def _moments(self) -> Iterator[Tensor]:
        return (moment for state in self._trainer.optimizer.state.values() for moment in moments_of(state))

    def _update(self, batch: BatchHandle, plan: StepPlan, version: int) -> None:
        self._check_version(version)
        rows = rank_rows(plan.updates, self._rank)
        names = dict.fromkeys((*training_columns(self._config), *layout_columns(batch.columns)))
        mine = RankRows(rows, self._store.read(select(batch, rows), tuple(names)))
        self.wake(["weights", "optimizer"])
        incarnation, self._incarnation = self._incarnation, ""  # unusable until all updates are applied
        self._previous = copy_trained(self._module.model) if self._config.runtime.max_staleness else None
        try:
            with self._collective():
                metrics, telemetry = self._train(mine, plan, batch.step)
                own = metrics, self._store.take_traffic("update"), telemetry
                gathered = all_gather_object(own, self._mesh)
        except NonFiniteError as error:
            raise self._with_offending_rows(error, mine, batch.step) from None
        self._version, self._incarnation = version + 1, incarnation
        every, traffic, measured = zip(*gathered, strict=True)
        self._report = UpdateReport(
            policy=self.handle(),
            metrics=merge_metrics(every),
            traffic=reduce(add, traffic),
            telemetry=merge_metrics(measured),
        )

    def _train(self, rows: RankRows, plan: StepPlan, step: int) -> tuple[Metrics, Metrics]:
        """Run the plan's updates; return this rank's part of their metrics, and what it measured."""
        started = time.perf_counter()
        with profiled(self._run, step, self._telemetry.worker, "update"):
            parts = [
                self._trainer.update(
                    *(rows, update, self._rank), step=step, part=part, lr_scale=plan.lr_scale, num_steps=plan.num_steps
                )
                for part, update in enumerate(plan.updates)
            ]
            seconds = self._trainer.stopwatch.take()  # waits for the device
            elapsed = time.perf_counter() - started
        prompts, responses = (row_lengths(rows.columns[name]) for name in TOKEN_COLUMNS)
        num_tokens, num_responses = int((prompts + responses).sum()), int(responses.sum())
        if PREFIX_COLUMN in rows.columns.schema.names:  # of which some are shared
            common = rows.columns[PREFIX_COLUMN].to_numpy().astype(np.int64)
            prompts, responses = common, prompts + responses - common
        computed = sum(micro.num_tokens for update in plan.updates for micro in update.rank(self._rank))
        observed = self._config.loss.observation_coef > 0
        speed = self._telemetry.throughput(
            "update",
            num_tokens,
            elapsed,
            lambda work: work.update(
                prompts,
                responses,
                checkpointing=False,
                is_frozen=self._config.model.lora is not None,
                num_shared=num_tokens - computed,
                num_scored=num_responses if observed else int(as_tensor(rows.columns["loss_mask"]).sum()),
            ),
        )
        num_micros = sum(update.num_micros for update in plan.updates)
        return merge_metrics(parts), speed | micro_batch_seconds(seconds, num_micros) | self._telemetry.memory()

    @traced("rl.sync")
    def send_weights(self, version: int, route: WeightsRoute) -> SentWeights | None:
        """Send the parameters of `version` to engines: rank 0 sends, the other ranks take part in gathering.

        If the previous version may still sample, it can be sent as well.

        Args:
            version: The version.
            route: How to send, and to what kind of engines.

        Raises:
            VersionError: The worker holds another version.
            WeightsError: No space is left for them.
            WorkerLostError: A receiver or another rank is gone.
        """
        leaving = self._weight_sync.leave_on_error() if self._rank == 0 else nullcontext()
        with leaving, self._collective(), self.weights(version) as weights:
            started = time.perf_counter()
            probe = self._score_probe() if self._config.weights.probe else None
            probe_seconds = time.perf_counter() - started
            if not route.is_complete:
                changing = changing_weights(weights, self._module.model, as_adapters=self._sends_adapters)
                route = route.replace(is_complete=len(changing) == len(weights))
                weights = changing
            tensors = gathered(weights, sent_specs(weights, route.dtype))
            if self._rank == 0:
                sent = self._weight_sync.send(version, weights, tensors, route, probe)
                return sent.replace(probe_seconds=probe_seconds)
            join_gather(tensors)
        return None

    def _score_probe(self) -> ProbeRow:
        dtype = self._config.model.dtype_on(self._module.model.device.type)
        return score_probe(self._module, self._config, dtype)

    @contextmanager
    def weights(self, version: int) -> Iterator[dict[str, Tensor]]:
        """Hold the parameters of `version` as engines have them, sharded: not copies, valid within the block only.

        Raises:
            VersionError: `version` is neither the current one nor the previous one if that was kept.
        """
        self.wake(["weights"])
        if self._previous is None or version != self._version - 1:
            self._check_version(version)
            yield published_weights(self._module.model, as_adapters=self._sends_adapters)
        else:
            with swapped_weights(self._module.model, self._previous):
                yield published_weights(self._module.model, as_adapters=self._sends_adapters)

    @property
    def _sends_adapters(self) -> bool:
        return self._config.model.publishes_adapters

    def weight_group_member(self) -> WeightGroupMember:
        """Return its GPU."""
        return self._weight_sync.member()

    def open_weight_rendezvous(self, num_receivers: int) -> ProcessGroupHandle:
        """Host the rendezvous of a new weight group."""
        return self._weight_sync.open_rendezvous(num_receivers)

    def init_weight_group(self, group: ProcessGroupHandle, rank: int, on_gpus: bool) -> None:
        """Join a weight group; the sender has rank 0."""
        self._weight_sync.join(group, rank, on_gpus=on_gpus)

    def save(self, version: int) -> None:
        """Begin to write the checkpoint of `version` unless it exists; see `PolicyCheckpoints.save`.

        Raises:
            VersionError: The worker holds another version.
            CheckpointError: The previous checkpoint, or this one, could not be written.
        """
        self._check_version(version)
        self.wake(["weights", "optimizer"])
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
        """Remove the checkpoints that the config doesn't keep; see `PolicyCheckpoints.retain`.

        Of a fork that keeps all columns, the first version stays: no steps lead to it.
        """
        fork = load_fork(self._directory) if self._config.store.keep_steps == "all" else None
        return self._checkpoints.retain(evals, fork.step if fork else None)

    def restore(self) -> None:
        """Go back, or on, to the newest complete checkpoint: weights, optimizer, and torch's random state."""
        self.wake(["weights", "optimizer"])
        with self._collective():
            self._trainer.optimizer.state.clear()  # the checkpoint of a policy that was never updated has none
            self._restore()

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
        if len(mine := np.intersect1d(error.rows, rows.rows)):
            file = pa.BufferOutputStream()
            with pa.ipc.new_file(file, rows.columns.schema) as writer:
                writer.write(rows.take(mine))
            self._directory.folder.write(f"non_finite/step-{step:06d}-rank-{self._rank}.arrow", file.getvalue())
        return NonFiniteError(f"{error}; their columns are in {self._directory.url}/non_finite", error.rows)

    def _check_version(self, version: int) -> None:
        if not self._incarnation:
            raise VersionError("the policy worker holds no complete version: an update failed in it; restart it")
        if self._version != version:
            raise VersionError(f"the policy worker holds version {self._version}, not the expected {version}")
