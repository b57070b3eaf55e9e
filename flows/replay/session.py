"""The workers of a replay: a run's own policy and reference ranks, with a scratch directory in place of the run's.

They read the run's stored columns and put their own in the scratch directory, which is removed at the end. No engine,
no environment and no Prefect server takes part, and nothing of the run itself is written.
"""

import asyncio
import logging
import os
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from flows.lifecycle.secrets import take_secrets
from flows.lifecycle.session import connect, while_ray_lives
from infra.checkpoints import CheckpointStore, open_checkpoints
from infra.engines.families import with_sharing
from infra.history.past_weights import History, Start
from infra.history.stored_step import StoredStep
from infra.ray.ranks import WorkerGroup
from infra.storage import places
from infra.storage.identity import new_identity
from infra.storage.runs import RunDirectory, open_folder
from infra.stores.files import FsspecColumnStore
from infra.stores.open import forget_store, open_store
from infra.workers.inputs import check_models, model_paths
from infra.workers.launch import get_group, kill_workers, monitored_workers
from infra.workers.layout import frozen_groups
from infra.workers.placement import check_resources
from rl_core.advantages import prepare_updates
from rl_core.planning.plan import rows_by_rank
from rl_core.views import decode_ints, number_prompts, with_column, with_groups
from rl_core.views.integers import as_int64
from schemas.batch import BatchHandle, ColumnGroup, StoreTraffic
from schemas.config.run import RunConfig
from schemas.plan import StepPlan
from schemas.rollout import RolloutHandle
from schemas.step import AdvantageHandle, PolicyHandle, RunHandle, UpdateReport
from tasks.advantage import compute_step_advantages, update_policy
from tasks.logprob import plan_scoring, score_behavior, score_reference, score_teachers

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SCRATCH = ".replay"  # next to the runs: all workers reach it, and checkpoints can be hard links


@dataclass(frozen=True)
class ReplayedStep:
    """A step that was computed again."""

    batch: BatchHandle  # with the columns that the replay put
    advantage: AdvantageHandle
    update: UpdateReport


class ReplaySession:
    """The workers of a replay, and what they put."""

    def __init__(self, run: RunHandle) -> None:
        self.run, self._directory = run, RunDirectory.of(run)
        self.checkpoints: CheckpointStore = open_checkpoints(self._directory, run.config.checkpoint)

    @property
    def store(self) -> FsspecColumnStore:
        """What the replay has put, over the columns of the run."""
        store = open_store(self.run)
        assert isinstance(store, FsspecColumnStore)
        return store

    async def begin(self, start: Start, checkpoints: CheckpointStore) -> None:
        """Start the policy with a checkpoint, and repeat the updates that lead from it to the version wanted.

        Raises:
            CheckpointError: The checkpoint was removed in the meantime.
            PipelineError: What the workers raise.
        """
        if start.has_checkpoint:
            self.checkpoints.take_from(checkpoints, start.version)
        await self._policy()
        for step in start.steps:
            await self.repeat(step)
            step.release()

    async def rewind(self, checkpoints: CheckpointStore, version: int) -> None:
        """Have the policy hold a version, whichever it holds now; all checkpoints but its one are removed.

        Raises:
            CheckpointError: It isn't complete there.
            PipelineError: What the workers raise.
        """
        self.checkpoints.remove_all()
        self.checkpoints.take_from(checkpoints, version)
        await (await self._policy()).call("restore")

    async def reach(self, start: Start, checkpoints: CheckpointStore) -> None:
        """Do what `begin` does, and write the checkpoint of the version that is reached."""
        await self.begin(start, checkpoints)
        await self.save(start.version + len(start.steps))

    async def repeat(self, stored: StoredStep) -> UpdateReport:
        """Update the policy as the run did: with the columns and the plan that it stored."""
        plan, config = stored.plan, self.run.config
        if (
            plan is None
            or plan.num_ranks != config.runtime.num_policy_ranks
            or (not config.packing.share_prompts and _shares(plan, stored.batch))
        ):
            plan = self._plan_again(stored)
        handle = AdvantageHandle(batch=stored.batch, plan=plan, metrics={}, traffic=StoreTraffic())
        return await update_policy.fn(self.run, self._handle(stored.step), handle)

    async def replay(self, stored: StoredStep, rollout: RolloutHandle) -> ReplayedStep:
        """Compute all stages of a step after its rollout again."""
        policy, config = self._handle(stored.step), self.run.config
        self.store.open(stored.step)
        batch, groups = stored.rows.replace(run_id=self.run.run_id), list[ColumnGroup]()
        row_kl, apart = None, rollout.pairs_apart
        if config.scores_behavior:
            groups.append((await score_behavior.fn(self.run, policy, batch, apart)).group)
        if config.kl.coef:
            scored = await score_reference.fn(self.run, policy, with_groups(batch, groups), apart)
            groups.append(scored.group)
            row_kl = scored.row_kl
        if config.distillation:
            scored = await score_teachers.fn(self.run, policy, with_groups(batch, groups))
            groups.append(scored.group)
        if config.time_shares_gpus:
            for frozen in frozen_groups(config):
                await (await get_group(self.run, *frozen)).call("sleep", ("weights",))
        batch = with_groups(batch, groups)
        advantage = await compute_step_advantages.fn(self.run, policy, batch, rollout, row_kl)
        advantage = advantage.replace(plan=_scheduled(advantage.plan, stored))
        update = await update_policy.fn(self.run, policy, advantage)
        return ReplayedStep(advantage.batch, advantage, update)

    async def logprobs(self, stored: StoredStep, version: int, stage: str) -> pa.Array:
        """Return the log-probs of a step's rows under the policy's version: float32 nats, of the axis `response`.

        Args:
            stored: The step.
            version: The version that the policy has.
            stage: A name for the chunks, another one for each version.
        """
        group, batch = await self._policy(), stored.rows.replace(run_id=self.run.run_id)
        self.store.open(stored.step)
        plan = plan_scoring(self.run, batch, group, stored.rollout.pairs_apart)
        results = await group.call("score", batch, plan, version, stage)
        puts = [result.put for result in results if result.put is not None]
        scored = with_column(batch, puts[0].dtypes, [put.chunk for put in puts], rows_by_rank(plan))
        return self.store.read(scored, ["behavior_logprobs"])["behavior_logprobs"]

    async def save(self, version: int) -> None:
        """Write the checkpoint of the version that the policy has, and wait for it."""
        group = await self._policy()
        await group.call("save", version)
        await group.call("finish_saving")

    def _plan_again(self, stored: StoredStep) -> StepPlan:
        """Plan a step whose plan is for another number of ranks or another packing, or lost; the KL doesn't matter."""
        row_kl = [0.0] * stored.rollout.num_rows if self.run.config.kl.in_reward else None
        plan = prepare_updates(self.run.config, stored.step, stored.rollout, row_kl, number_prompts(stored.rows)).plan
        logger.warning(
            "step %d is planned again for %d ranks and %s rows: its update may differ by rounding",
            *(stored.step, plan.num_ranks, self.run.config.packing.kind),
        )
        return _scheduled(plan.replace(lr_scale=self._directory.decisions.lr_scale(stored.step)), stored)

    async def _policy(self) -> WorkerGroup:
        return await get_group(self.run, "policy")

    def stop(self) -> None:
        """Kill the workers, which frees their memory; what they have saved stays until the end of the session."""
        kill_workers(self.run.identity, self.run.config)

    def _handle(self, step: int) -> PolicyHandle:
        return PolicyHandle(run_id=self.run.run_id, version=step, incarnation="")


@contextmanager
def replay_session(source: RunDirectory, config: RunConfig, run_id: str) -> Iterator[ReplaySession]:
    """Hold the workers of a replay, which are started when they are needed.

    Raises:
        ServiceError: No Ray responds.
        ConfigError: The Ray cluster has too few cores or GPUs.
        RunError: A model is not the one that the run was given.
    """
    check_models(source, model_paths(config))
    take_secrets(config.services)
    connect(config.services)
    config = _scratch_config(config)
    config, _ = with_sharing(config.replace(runtime=config.runtime.replace(device=check_resources(config))))
    directory = RunDirectory(places.join(places.join(source.runs_dir, SCRATCH), run_id))
    run = RunHandle(
        run_id=run_id,
        identity=new_identity(run_id),
        directory=directory.url,
        config=config,
        store_incarnation="",
        source=source.url,
    )
    _remove(directory)  # of a replay that was killed
    directory.decisions.copy_from(source.decisions, config.steps)  # a plan has a factor on the learning rate
    try:
        with monitored_workers(run.identity, config):
            yield ReplaySession(run)
    finally:
        kill_workers(run.identity, config)
        forget_store(run)
        _remove(directory)


def in_ray(work: Coroutine[Any, Any, Result]) -> Result:
    """Run work that uses the connected Ray to its end.

    Raises:
        RayLostError: Ray was lost.
    """
    return asyncio.run(while_ray_lives(work))


def write_version(history: History, start: Start, target: CheckpointStore, run_id: str) -> None:
    """Have the checkpoint of a version in another place: the run's own if it has one, else one with repeated updates.

    Args:
        history: The run.
        start: What the version is made of; the starting weights need no checkpoint.
        target: The place.
        run_id: The id by which workers are named, if updates have to be repeated.

    Raises:
        CheckpointError: The run's own was removed in the meantime.
        PipelineError: What the workers raise.
    """
    if start.steps:
        with replay_session(history.directory, history.directory.config(), run_id) as session:
            in_ray(session.reach(start, history.checkpoints))
            target.take_from(session.checkpoints, start.version + len(start.steps))
    elif start.has_checkpoint:
        target.take_from(history.checkpoints, start.version)


def new_scratch_id(run_id: str) -> str:
    """Return an id for the workers of a replay."""
    return f"replay-{run_id}-{os.urandom(4).hex()}"


def _shares(plan: StepPlan, batch: BatchHandle) -> bool:
    """Return whether a plan counts tokens once that several rows begin with."""
    lengths = decode_ints(batch.prompt_lengths) + decode_ints(batch.response_lengths)
    return any(update.num_tokens < lengths[as_int64(update.rows)].sum() for update in plan.updates)


def _scheduled(plan: StepPlan, stored: StoredStep) -> StepPlan:
    """Return a step's plan with the learning rate's schedule that the run had then: it may be longer by now."""
    return plan.replace(num_steps=stored.plan.num_steps) if stored.plan is not None else plan


def _scratch_config(config: RunConfig) -> RunConfig:
    """Return the config without what a replay has no use for: engines, a place for checkpoints, profiles."""
    one = {"num_workers": 1, "tensor_parallel": 1}
    return config.replace(
        rollout=config.rollout.replace(**{key: value for key, value in one.items() if hasattr(config.rollout, key)}),
        checkpoint=config.checkpoint.replace(url=None),
        runtime=config.runtime.replace(profile_steps=()),
    )


def _remove(directory: RunDirectory) -> None:
    open_folder(directory.runs_dir).remove_folder(directory.run_id)
    if directory.is_local:
        with suppress(OSError):  # others are in it
            os.rmdir(directory.runs_dir)
