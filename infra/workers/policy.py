"""The policy worker: holds the live weights and the optimizer, and is the only one that changes them."""

import os
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save

from infra.checkpoint import (
    checkpoint_path,
    complete_versions,
    load_trainer_state,
    newest_checkpoint,
    save_checkpoint,
)
from infra.models import load_model, load_tokenizer
from infra.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.stores.open import open_store
from infra.stores.plasma import ChunkWriter
from infra.workers.scoring import TOKEN_COLUMNS, packed_row, score_column
from rl_core.columns.jagged import as_tensor
from rl_core.losses import LossInputs, policy_loss
from rl_core.replay.attention import use_packed_attention
from rl_core.replay.logprobs import packed_logprobs
from rl_core.replay.probe import leak_probe
from rl_core.schedule import learning_rate
from schemas.batch import BatchHandle, ChunkKey
from schemas.config.model import ModelConfig
from schemas.errors import NonFiniteError, VersionError
from schemas.metrics import Max, Mean, Metrics, merge_metrics
from schemas.plan import MicroBatch, StepPlan, UpdatePlan
from schemas.rollout import PutResult
from schemas.step import PolicyHandle, RunHandle, UpdateReport


class PolicyWorker(ChunkWriter):
    """One rank of the policy.

    Args:
        run: The run it belongs to.
        rank: Its number; 0 while there is one rank.
        store: The column store; None connects to the run's.
    """

    def __init__(self, run: RunHandle, rank: int = 0, store: ColumnStore | None = None) -> None:
        self._run, self._config, self._rank, self._given_store = run, run.config, rank, store
        self._directory = RunDirectory(Path(run.directory))
        self._incarnation = ""  # set by each restore
        self._version = 0
        self._num_updates = 0
        self._report: UpdateReport | None = None

    def start(self) -> PolicyHandle:
        """Load the newest checkpoint, else the starting weights. A worker that has weights keeps them.

        Raises:
            ReplayError: Packed sequences would see each other under this model.
        """
        if self._incarnation:
            return self.handle()
        set_threads(self._config.runtime.num_threads)
        torch.manual_seed(self._config.seed)
        self._store: ColumnStore = self._given_store or open_store(self._run)
        self._tokenizer = load_tokenizer(self._config.model)
        found = newest_checkpoint(self._directory.checkpoints)
        self._model = load_model(ModelConfig(path=str(found[0])) if found else self._config.model)
        self._optimizer = self._new_optimizer()
        if found:
            path, manifest = found
            load_trainer_state(path, self._model, self._optimizer)
            self._version, self._num_updates, self._report = (
                manifest.version,
                manifest.num_updates,
                manifest.report,
            )
        use_packed_attention(self._model)
        leak_probe(self._model)
        self._incarnation = uuid.uuid4().hex
        return self.handle()

    def handle(self) -> PolicyHandle:
        """The version it holds."""
        return PolicyHandle(run_id=self._run.run_id, version=self._version, incarnation=self._incarnation)

    def score(self, batch: BatchHandle, version: int) -> PutResult:
        """Put `behavior_logprobs`: the trainer's own log-probs under the weights that sampled.

        Raises:
            VersionError: It no longer holds `version`.
        """
        self._expect(version)
        return score_column(
            self._model,
            self._store,
            batch,
            "behavior_logprobs",
            ChunkKey(run_id=batch.run_id, step=batch.step, stage="behavior", shard=self._rank),
            self._config.packing,
            self._config.rollout.temperature,
        )

    def update(self, batch: BatchHandle, plan: StepPlan, version: int) -> UpdateReport:
        """Apply the plan's updates to `version`, exactly once; asked again, answer with the recorded report.

        Raises:
            VersionError: It holds neither `version` nor the one that this update leads to.
            NonFiniteError: A loss or gradient is not finite. The weights are as before that optimizer step, and
                the worker reloads the last checkpoint when it is started again.
        """
        if self._version == version + 1 and self._report is not None:
            return self._report
        self._expect(version)
        columns = self._store.read(batch, self._training_columns)
        incarnation, self._incarnation = self._incarnation, ""  # not usable until all updates are in
        parts = [self._apply(columns, update) for update in plan.updates]
        self._version, self._incarnation = version + 1, incarnation
        traffic = self._store.take_traffic("update")
        self._report = UpdateReport(policy=self.handle(), metrics=merge_metrics(parts), traffic=traffic)
        return self._report

    def weights(self, version: int) -> bytes:
        """The parameters of `version` as safetensors bytes; tied ones once.

        Raises:
            VersionError: It holds another version.
        """
        self._expect(version)
        return save({name: tensor.detach() for name, tensor in self._model.named_parameters()})

    def save(self) -> str:
        """Write the checkpoint of the version it holds, unless it is there; returns its path."""
        self._expect(self._version)
        if self._version in complete_versions(self._directory.checkpoints):
            return str(checkpoint_path(self._directory.checkpoints, self._version))
        path = save_checkpoint(
            self._directory.checkpoints,
            version=self._version,
            num_updates=self._num_updates,
            report=self._report,
            model=self._model,
            tokenizer=self._tokenizer,
            optimizer=self._optimizer,
            keep_last=self._config.runtime.keep_checkpoints,
        )
        return str(path)

    def _apply(self, columns: pa.RecordBatch, update: UpdatePlan) -> Metrics:
        """One optimizer step over the micro-batches of this rank."""
        lr = learning_rate(self._config.optim, self._num_updates, self._config.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad(set_to_none=True)
        parts = [self._backward(columns, micro, update) for micro in update.ranks[self._rank] if micro.rows]
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.optim.max_grad_norm)
        if not torch.isfinite(norm):
            raise NonFiniteError(
                f"gradient norm is {norm.item()} in update {self._num_updates} of version {self._version}; "
                f"rows {list(update.rows)}; the optimizer has not stepped"
            )
        self._optimizer.step()
        self._num_updates += 1
        own = {"grad_norm": Mean(total=norm.item(), weight=1), "learning_rate": Mean(total=lr, weight=1)}
        return merge_metrics([*parts, own])

    def _backward(self, columns: pa.RecordBatch, micro: MicroBatch, update: UpdatePlan) -> Metrics:
        rows = columns.take(pa.array(micro.rows, type=pa.int64()))
        row = packed_row(rows)
        logprobs = packed_logprobs(
            self._model,
            row,
            temperature=self._config.rollout.temperature,
            chunk_tokens=self._config.packing.logits_chunk_tokens,
        )
        has_reference = "reference_logprobs" in rows.schema.names
        inputs = LossInputs.from_rows(
            policy_logprobs=logprobs,
            behavior_logprobs=as_tensor(rows["behavior_logprobs"]),
            reference_logprobs=as_tensor(rows["reference_logprobs"]) if has_reference else None,
            advantages=as_tensor(rows["advantages"]),
            loss_mask=as_tensor(rows["loss_mask"]),
            response_lengths=row.response_lengths,
        )
        loss, metrics = policy_loss(
            inputs,
            self._config.loss,
            num_loss_tokens=update.num_loss_tokens,
            num_live_sequences=update.num_live_sequences,
        )
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"loss is {loss.item()} in update {self._num_updates} of version {self._version}; "
                f"rows {list(micro.rows)} of the batch; the optimizer has not stepped"
            )
        loss.backward()
        mismatch = as_tensor(rows["behavior_logprobs"]) - as_tensor(rows["sampler_logprobs"])
        return metrics | _mismatch_metrics(mismatch[inputs.loss_mask])

    @property
    def _training_columns(self) -> tuple[str, ...]:
        columns = (*TOKEN_COLUMNS, "loss_mask", "sampler_logprobs", "behavior_logprobs", "advantages")
        return (*columns, "reference_logprobs") if self._config.loss.kl_coef else columns

    def _new_optimizer(self) -> torch.optim.Optimizer:
        optim = self._config.optim
        return torch.optim.AdamW(
            self._model.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.epsilon,
            weight_decay=optim.weight_decay,
        )

    def _expect(self, version: int) -> None:
        if not self._incarnation:
            raise VersionError("the policy worker holds no whole version: an update failed in it; start it again")
        if self._version != version:
            raise VersionError(f"the policy worker holds version {self._version}, not the expected {version}")


def set_threads(num_threads: int) -> None:
    """Give torch `num_threads` threads, or all of the machine's cores for 0."""
    torch.set_num_threads(num_threads or os.cpu_count() or 1)


def _mismatch_metrics(difference: torch.Tensor) -> Metrics:
    """How far the engine's log-probs are from the trainer's for the same weights, in nats."""
    if not difference.numel():
        return {}
    distance = np.abs(difference.numpy())
    return {
        "mismatch/mean": Mean(total=float(distance.sum()), weight=distance.size),
        "mismatch/max": Max(value=float(distance.max())),
    }
