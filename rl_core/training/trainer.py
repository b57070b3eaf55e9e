"""One rank's part of an update: planned micro-batches in, an optimizer step out.

All ranks have the same number of micro-batches: with sharded weights, each forward and backward is a collective, in
which a rank without rows takes part with a dummy.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl_core.columns.jagged import TURN_COLUMNS, as_tensor, flat_values
from rl_core.losses import LossInputs, policy_loss
from rl_core.training.muon import matrices_of
from rl_core.training.optimizer import clip_gradients, learning_rate, make_optimizer
from rl_core.training.rows import (
    EXPERT_COLUMNS,
    MASK_COLUMNS,
    SELECTED_COLUMN,
    TOKEN_COLUMNS,
    TOP_COLUMNS,
    RankRows,
    packed_row,
    token_advantages,
    with_selected,
)
from rl_core.training.scoring_module import ScoringModule
from rl_core.training.sharding import all_gather_object, sync_gradients
from rl_core.training.stopwatch import Stopwatch, time_collectives
from schemas.config.loss import CovarianceLoss
from schemas.config.run import RunConfig
from schemas.errors import NonFiniteError
from schemas.metrics import Mean, Metrics, merge_metrics
from schemas.plan import MicroBatch, UpdatePlan

_LOSS_COLUMNS = ("loss_mask", "sampler_logprobs", "advantages")


def policy_columns(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the columns that the policy reads to score rows."""
    return (*TOKEN_COLUMNS, *(EXPERT_COLUMNS if config.rollout.router_replay else ()), *mask_columns(config))


def mask_columns(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the columns by which scores are of the tokens that could be sampled; () if of all."""
    return MASK_COLUMNS if config.rollout.sampling_mask else ()


def training_columns(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the columns that an update reads."""
    return (*policy_columns(config), *_loss_columns(config))


def _loss_columns(config: RunConfig) -> tuple[str, ...]:
    if config.sft is not None:
        return ("loss_mask",)
    scored = {
        "behavior_logprobs": config.scores_behavior,
        "reference_logprobs": config.kl.coef > 0 and not config.kl.in_reward,
        "teacher_logprobs": config.distillation is not None,
        **dict.fromkeys(TOP_COLUMNS, config.distillation is not None and config.distillation.reads_top),
    }
    turns = TURN_COLUMNS if config.advantage.kind == "turn_level" else ()
    return (*_LOSS_COLUMNS, *turns, *(name for name, is_read in scored.items() if is_read))


class Trainer:
    """One rank's weights and optimizer.

    Args:
        module: The model, sharded if there are several ranks.
        config: The run's config.
        mesh: The ranks; None: this rank only.

    Attributes:
        num_updates: Optimizer steps so far.
        stopwatch: The seconds of the updates' parts: forward, backward, collectives and optimizer.
    """

    def __init__(self, module: ScoringModule, config: RunConfig, mesh: DeviceMesh | None = None) -> None:
        self.module, self._config, self._mesh = module, config, mesh
        matrices = matrices_of(module.model) if config.optim.kind == "muon" else ()
        self.optimizer = make_optimizer(module, config.optim, matrices)
        self.num_updates = 0
        self._device = next(module.parameters()).device
        self.stopwatch = Stopwatch(self._device)
        time_collectives(module, self.stopwatch)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trainable parameters by the model's own names; tied parameters once."""
        return {name: weight for name, weight in self.module.model.named_parameters() if weight.requires_grad}

    def update(
        self,
        rows: RankRows,
        update: UpdatePlan,
        rank: int = 0,
        *,
        step: int = 0,
        part: int = 0,
        lr_scale: float = 1.0,
        num_steps: int | None = None,
    ) -> Metrics:
        """Run one optimizer step over the micro-batches of all ranks.

        Args:
            rows: At least this rank's rows of the update, with `training_columns`.
            update: The plan.
            rank: This rank.
            step: The step, for the learning rate's schedule.
            part: The update's number within the step, from 0.
            lr_scale: The factor on the scheduled learning rate.
            num_steps: The steps of the run, for the schedule; None: those of the config.

        Returns:
            This rank's part of the metrics; metrics that are equal on all ranks are reported by rank 0 alone.

        Raises:
            NonFiniteError: On every rank, naming the offending rows of all ranks. The weights are unchanged.
        """
        num_steps = self._config.steps if num_steps is None else num_steps
        lr = lr_scale * learning_rate(self._config.optim, self.num_updates, step, part, num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        rows = self._with_selected(rows, update, rank, step, part)
        with self.stopwatch.running():
            parts, offending = self._accumulate(rows, update, rank)
            self._require_finite("loss", offending)
            with self.stopwatch("optimizer"):
                norm = clip_gradients(self.named_parameters().values(), self._config.optim.max_grad_norm)
                if not math.isfinite(norm):
                    self._require_finite("gradient", self._without_finite_gradient(rows, update, rank))
                    # That of each micro-batch is finite, now: their sum is not, or it was not the first time.
                    mine = (row for micro in self._planned(update.rank(rank)) for row in micro.rows)
                    self._require_finite("gradient", dict.fromkeys(mine, ()))
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)  # now, as they would take memory until the next update
        self.num_updates += 1
        if rank == 0:  # as means, they are averaged over the updates of a step
            parts.append({"grad_norm": Mean(total=norm, weight=1), "learning_rate": Mean(total=lr, weight=1)})
        return merge_metrics(parts)

    def _with_selected(self, rows: RankRows, update: UpdatePlan, rank: int, step: int, part: int) -> RankRows:
        """Add the tokens that the loss selects, if it does; a step's first update takes ratios from its own forward."""
        loss = self._config.loss
        if not isinstance(loss, CovarianceLoss):
            return rows
        rows = with_selected(rows, update, rank, self._config, step, self._mesh)
        behavior, trained = (flat_values(rows.columns[name]) for name in ("behavior_logprobs", "loss_mask"))
        if part or loss.behavior == "recompute" or not np.isfinite(behavior[trained]).all():  # which is reported
            return rows
        return replace(rows, columns=rows.columns.drop_columns(["behavior_logprobs"]))

    def _accumulate(
        self, rows: RankRows, update: UpdatePlan, rank: int
    ) -> tuple[list[Metrics], dict[int, tuple[str, ...]]]:
        """Sum the gradients of this rank's micro-batches; return their metrics, and the rows with a non-finite loss."""
        parts: list[Metrics] = []
        offending: dict[int, tuple[str, ...]] = {}
        micros = self._planned(update.rank(rank))
        every = self._config.runtime.gradient_sync == "every_micro_batch"
        for number, micro in enumerate(micros, start=1):
            sync_gradients(self.module, every or number == len(micros))
            with self.stopwatch("forward"):
                inputs = self._inputs(rows, micro)
                loss, metrics = self._loss(inputs, update)
            parts.append(metrics)
            if not torch.isfinite(loss):
                offending |= _non_finite(inputs, micro)
            with self.stopwatch("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
        return parts, offending

    def _planned(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Drop dummies if there are no other ranks, whose collectives they take part in."""
        return [micro for micro in micros if micro.rows or self._mesh is not None]

    def _inputs(self, rows: RankRows, micro: MicroBatch) -> LossInputs:
        columns = rows.take(micro.rows)
        row = packed_row(columns, micro.num_tokens)
        names = {*_loss_columns(self._config)} - {*TURN_COLUMNS, TOP_COLUMNS[1]}  # read by those that are called here
        if isinstance(self._config.loss, CovarianceLoss):  # whose first update of a step has no behavior log-probs
            names = {*names, SELECTED_COLUMN} - ({"behavior_logprobs"} - {*columns.schema.names})
        given = {name: as_tensor(columns[name]) for name in names}
        if "advantages" in given:
            given["advantages"] = token_advantages(columns)
        if not self._config.loss.observation_coef:  # no other token's log-prob is used
            trained = given["loss_mask"]
            row, given = row.score_only(trained), {name: values[trained] for name, values in given.items()}
        row, given = row.to(self._device), {name: values.to(self._device) for name, values in given.items()}
        logprobs, entropy, top_logprobs, _ = self.module(
            row, entropy="grad" if self._config.loss.entropy_coef else "no_grad"
        )
        own = logprobs.detach()
        unless_given = {"behavior_logprobs": own, "advantages": torch.ones_like(own)}
        return LossInputs.from_rows(
            policy_logprobs=logprobs,
            entropy=entropy,
            policy_top_logprobs=top_logprobs,
            response_lengths=row.response_lengths,
            **unless_given | given,
        )

    def _loss(self, inputs: LossInputs, update: UpdatePlan) -> tuple[Tensor, Metrics]:
        return policy_loss(
            inputs,
            self._config.loss,
            self._config.kl,
            self._config.correction,
            norm_tokens=self._config.loss.norm_tokens or self._config.rollout.max_response_tokens,
            num_loss_tokens=update.num_loss_tokens,
            num_live_sequences=update.num_live_sequences,
            num_observation_tokens=update.num_observation_tokens,
            distillation=self._config.distillation,
        )

    def _without_finite_gradient(self, rows: RankRows, update: UpdatePlan, rank: int) -> dict[int, tuple[str, ...]]:
        """Return the rows of micro-batches whose own gradient is not finite; all ranks run theirs in step."""
        found: dict[int, tuple[str, ...]] = {}
        sync_gradients(self.module, True)
        for micro in self._planned(update.rank(rank)):
            self.optimizer.zero_grad(set_to_none=True)
            self._loss(self._inputs(rows, micro), update)[0].backward()  # type: ignore[no-untyped-call]
            if not math.isfinite(clip_gradients(self.named_parameters().values(), 1.0)):
                found |= dict.fromkeys(micro.rows, ())
        return found

    def _require_finite(self, what: str, offending: dict[int, tuple[str, ...]]) -> None:
        """Stop all ranks if any of them found offending rows."""
        found = {row: names for each in all_gather_object(offending, self._mesh) for row, names in each.items()}
        if not found:
            return
        self.optimizer.zero_grad(set_to_none=True)
        values = sorted({name for names in found.values() for name in names})
        seen = f", whose {', '.join(values)} are not finite" if values else ""
        raise NonFiniteError(
            f"the {what} of update {self.num_updates} is not finite: rows {sorted(found)} of the step's batch{seen}; "
            "the optimizer has not stepped",
            tuple(sorted(found)),
        )


def _non_finite(inputs: LossInputs, micro: MicroBatch) -> dict[int, tuple[str, ...]]:
    """Return the rows that have a non-finite input on a trained token, and the inputs' names; all rows if none has."""
    trained = inputs.select_trained()
    found: dict[int, tuple[str, ...]] = {}
    for name, values in trained.finite_columns().items():
        finite = torch.isfinite(values).reshape(len(values), -1).all(-1)
        for at in set(trained.sequence_index[~finite].tolist()):
            found[micro.rows[at]] = (*found.get(micro.rows[at], ()), name)
    return found or dict.fromkeys(micro.rows, ())
