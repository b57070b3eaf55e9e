"""The rollout worker: generates, scores and stores the groups of each step that it is assigned."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from infra.datasets import load_run_prompts
from infra.datasets.prompts import check_prompts
from infra.datasets.teacher_prompts import open_teacher_prompts
from infra.engines.base import EngineUsage, RolloutEngine, Sampling, require_awake
from infra.engines.open import open_engine
from infra.environments.open import open_episodes
from infra.environments.trajectory import describe, measure
from infra.models.load import load_tokenizer, max_positions, num_embeddings, stop_token_ids
from infra.ray.device import choose_device, set_threads
from infra.ray.tracing import start_tracing, traced
from infra.rewards.open import open_reward_scorer
from infra.storage.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.stores.open import open_store
from infra.weights.endpoint import WeightSyncEndpoint
from infra.workers.inputs import check_inputs
from infra.workers.prompt_groups import Evaluator, GroupSampler
from infra.workers.reuse import copy_groups, describe_groups
from infra.workers.reward import open_model_here
from infra.workers.reward_calls import model_opener
from infra.workers.samples import Sample, make_shard, num_sampled, to_columns, trajectories_of
from infra.workers.sampling import ResponseSampler
from infra.workers.telemetry import WorkerTelemetry, profiled
from rl_core.columns.codec import value_dtypes
from rl_core.columns.prompts import rows_of_prompts, share_prompts
from rl_core.views import encode_ints
from schemas.batch import ChunkKey
from schemas.config.rollout import EvalConfig, RolloutConfig
from schemas.errors import ConfigError, VersionError
from schemas.metrics import Metrics
from schemas.placement import EngineTag, MemoryChange
from schemas.rollout import PartialGroups, PutResult, ReusedGroup, RolloutShard, SourceSchedule
from schemas.step import EvalShard, ProcessGroupHandle, RunHandle
from schemas.weights import LoadedWeights, Transport, WeightGroupMember


@dataclass(frozen=True)
class _PendingShard:
    """The samples of one shard, until they are put."""

    policy_version: int
    samples: list[Sample]
    described: RolloutShard
    schedule: SourceSchedule | None

    def answers(
        self,
        policy_version: int,
        groups: Sequence[int],
        begun: Sequence[PartialGroups],
        schedule: SourceSchedule | None,
    ) -> bool:
        """Return whether these are the rows of such a request: all of them, and nothing is to be tried again."""
        own = self.described
        has_failed = own.failure is not None or None in own.rewards
        asked = policy_version, tuple(groups), tuple(begun), schedule
        is_asked = (self.policy_version, own.groups, own.begun, self.schedule) == asked
        return is_asked and not own.unfinished and not has_failed


class RolloutWorker:
    """One of the run's `rollout.num_workers` rollout workers.

    It generates groups (all samples of one prompt), which it is assigned by their numbers within the step. Their
    samples are a function of the config, the policy version, the step and these numbers, not of which worker generates
    them or when.

    Args:
        run: The run it belongs to.
        number: Its number.
        store: The column store; None connects to the run's.
    """

    engine: RolloutEngine

    def __init__(self, run: RunHandle, number: int = 0, store: ColumnStore | None = None) -> None:
        self._run, self._config, self._number, self._store = run, run.config, number, store
        self._started = False
        self._pending: dict[tuple[int, int], _PendingShard] = {}  # by step and shard
        self._generated_step = -1
        start_tracing(run.run_id, run.config, f"{type(self).__name__}-{number}")

    def start(self) -> None:
        """Load the starting weights (version 0), the prompts and the reward function, once.

        Raises:
            UserError: The model, a data file or the reward function is not usable, the data is not what the run was
                given, or the model's context is too short for an evaluation's.
            EngineLostError: The engine has lost a process since then; the worker must be created again.
        """
        if self._started:
            self.engine.check()
            return
        config = self._config
        set_threads(config.runtime.num_threads)
        open_model = model_opener(self._run, self._number)
        if self._store is None:
            check_inputs(RunDirectory.of(self._run), config)
        else:  # it is an evaluation, of any prompts, and maybe without Ray
            open_model = partial(open_model_here, date=config.data.date)
        self._columns = self._store or open_store(self._run)
        self._scorer = scorer = open_reward_scorer(config.reward, open_model)
        tokenizer = load_tokenizer(config.model)
        # A run's are checked by its driver, in each start, and are those that it was given.
        self._prompts, held_out = load_run_prompts(config, tokenizer, are_checked=self._store is None)
        if self._store is not None:
            check_prompts(config, None, held_out, max_positions(config.model))
        self._teacher_prompts = open_teacher_prompts(config, tokenizer)
        self._vocab_size = num_embeddings(config.model)
        self._stop_token_ids = stop_token_ids(config.model, tokenizer) + config.rollout.stop_token_ids
        self.engine = open_engine(config, tokenizer)
        device = choose_device()
        self._telemetry = WorkerTelemetry(
            f"rollout-{self._number}",
            config.model,
            device,
            config.rollout.dtype_on("cuda" if device.type == "cuda" else "cpu"),
            config.rollout.gpus_per_worker,
        )
        self._weight_sync = WeightSyncEndpoint(self._run.run_id, device, config, self.engine)
        self._episodes = open_episodes(config, self.engine, tokenizer)
        sampler, sampled = ResponseSampler(self.engine, scorer, tokenizer, self._episodes), config.rollout
        sampling = self._sampling(sampled, sampled.max_response_tokens)
        self._groups = GroupSampler(self._run, sampler, self._prompts, self._columns, sampling, self._vocab_size)
        limit = config.eval.max_response_tokens or config.rollout.max_response_tokens
        sampling = self._sampling(config.eval, limit)
        self._evaluator = Evaluator(config, held_out, sampler, sampling) if held_out is not None else None
        scorer.wait_until_ready()
        self._started = True

    def close(self) -> None:
        """Release the weights, and kill the processes of rewards and environments."""
        self.engine.close()
        self._scorer.close()
        if self._episodes is not None:
            self._episodes.close()

    def sleep(self, tags: Collection[EngineTag]) -> MemoryChange:
        """Give up the engine's memory while others need it; see `RolloutEngine.sleep`. Pending rows are kept."""
        return self.engine.sleep(tags) if self._started else MemoryChange()

    def wake(self, tags: Collection[EngineTag]) -> MemoryChange:
        """Allocate the engine's memory again, and probe it if it has loaded weights meanwhile.

        See `RolloutEngine.wake`.

        Raises:
            StaleWeightsError: Its log-probs are not the trainer's; it has no version.
        """
        change = self.engine.wake(tags)
        self._weight_sync.probe()
        return change

    @traced("rl.sync")
    def load_weights(self, version: int, transport: Transport) -> LoadedWeights:
        """Load the weights of policy `version`, while the policy sends them; pending rows are kept.

        Raises:
            WeightsError: They are damaged, or of another version or model, or the engine computes with others.
            WorkerLostError: The policy is gone.
        """
        return self._weight_sync.load(version, transport)

    def weight_group_member(self) -> WeightGroupMember:
        """Return its GPU and the policy version that it holds."""
        return self._weight_sync.member()

    def init_weight_group(self, group: ProcessGroupHandle, rank: int, on_gpus: bool) -> None:
        """Join a weight group as rank 1 or higher."""
        self._weight_sync.join(group, rank, on_gpus=on_gpus)

    def generate(
        self,
        step: int,
        policy_version: int,
        shard: int,
        groups: Sequence[int],
        begun: Sequence[PartialGroups] = (),
        schedules: Mapping[int, SourceSchedule] | None = None,
    ) -> RolloutShard:
        """Generate and score the samples of these groups of `step` together, and keep them for `put`.

        If responses are sampled in parts, those of later steps are continued, and stored.

        Args:
            step: The step.
            policy_version: The version that samples.
            shard: The number of these groups' shard within the step.
            groups: The groups' numbers within the step, ascending.
            begun: What the rollout before has left unfinished of this shard.
            schedules: The curriculum's schedules of the step and of those sampled ahead, by step; None without one.

        Raises:
            StoreError: That can't be read.
            VersionError: The worker doesn't hold `policy_version`.
        """
        self._check_version(policy_version)
        schedule = (schedules or {}).get(step)
        held = self._pending.get((step, shard))
        if held is not None and held.answers(policy_version, groups, begun, schedule):
            return held.described  # to a driver that was killed before it could commit the answer
        is_first = step != self._generated_step  # of a step, only a worker's first shard is profiled
        self._generated_step, usage = step, EngineUsage()
        self.engine.usage = usage
        with profiled(self._run, step, self._telemetry.worker, "rollout") if is_first else nullcontext():
            samples, unfinished, seconds = self._groups.sample(step, shard, groups, begun, schedules or {})
        self._pending = {key: pending for key, pending in self._pending.items() if key[0] >= step}
        made = make_shard(step, shard, self._number, groups, samples, seconds)
        trajectories = trajectories_of(samples)
        telemetry = self._measure(samples, seconds["generate"], usage) | measure(trajectories)
        described = made.replace(
            begun=tuple(begun), unfinished=unfinished, turns=describe(trajectories), telemetry=telemetry
        )
        self._pending[step, shard] = _PendingShard(policy_version, samples, described, schedule)
        return described

    def has_shard(self, step: int, policy_version: int, shard: int) -> bool:
        """Return whether it has the rows of a shard, generated but not put yet."""
        pending = self._pending.get((step, shard))
        return pending is not None and pending.policy_version == policy_version

    def put(
        self,
        step: int,
        policy_version: int,
        shard: int,
        kept: Sequence[int],
        reward_parts: Sequence[str],
        holder: int,
    ) -> PutResult | None:
        """Store a shard's kept groups as one chunk, and drop the shard here; None if its rows aren't here.

        Args:
            step: The step.
            policy_version: The version that sampled.
            shard: The shard's number within the step.
            kept: The groups that the step keeps.
            reward_parts: The reward parts of all the step's samples, so that all chunks have the same columns.
            holder: The number of the worker that has generated the rows which the driver knows. Another one may hold
                rows of the shard from before a kill of the driver.

        Raises:
            StoreError: The store rejects the chunk; the worker keeps the shard.
        """
        if holder != self._number or not self.has_shard(step, policy_version, shard):
            return None
        pending = self._pending[step, shard]
        samples = [sample for sample in pending.samples if sample.group_id in kept]
        columns = to_columns(samples, pending.policy_version, self._vocab_size, reward_parts, self._teacher_prompts)
        result = self._store_rows(step, shard, columns)
        del self._pending[step, shard]
        return result

    def describe_reused(
        self, step: int, shard: int, groups: Sequence[int], reused: Sequence[ReusedGroup]
    ) -> RolloutShard:
        """Return the scalars of stored groups that the step trains on again; see `infra.workers.reuse`."""
        return describe_groups(self._run, step, shard, groups, reused)

    def put_reused(
        self,
        step: int,
        shard: int,
        groups: Sequence[int],
        reused: Sequence[ReusedGroup],
        reward_parts: Sequence[str],
    ) -> PutResult:
        """Store the rows of stored groups as rows of the step, too; see `infra.workers.reuse`."""
        return self._store_rows(step, shard, copy_groups(self._run, groups, reused, reward_parts))

    def num_held_out(self) -> int:
        """Return the number of held-out prompts.

        Raises:
            ConfigError: `data.eval_path` is not set.
        """
        return self._get_evaluator().num_prompts

    def evaluate(self, policy_version: int, rows: Sequence[int]) -> EvalShard:
        """Generate and score the samples of these held-out prompts; pending shards are kept.

        Raises:
            ConfigError: `data.eval_path` is not set.
            VersionError: The worker doesn't hold `policy_version`.
        """
        self._check_version(policy_version)
        return self._get_evaluator().generate(rows)

    def _store_rows(self, step: int, shard: int, rows: pa.RecordBatch) -> PutResult:
        """Store rows of a step's rollout as the chunk of a shard, each prompt once."""
        key = ChunkKey(run_id=self._run.run_id, step=step, stage="rollout", shard=shard)
        shared = share_prompts(rows)
        chunk = self._columns.put(key, shared)
        self._columns.flush()
        return PutResult(
            chunk=chunk,
            dtypes=value_dtypes(rows),
            traffic=self._columns.take_traffic("put"),
            prompt_rows=None if shared is rows else encode_ints(rows_of_prompts(shared["prompt_ids"])),
        )

    def _get_evaluator(self) -> Evaluator:
        if self._evaluator is None:
            raise ConfigError("data.eval_path is not set; set it to a file of held-out prompts to evaluate on")
        return self._evaluator

    def _measure(self, samples: Sequence[Sample], seconds: float, usage: EngineUsage) -> Metrics:
        """Return what a generation of this time measured: throughput, the engine's usage and peak memory.

        Responses that are sampled in parts count with their step.
        """
        prompt_lengths = np.array([len(sample.prompt.prompt_ids) for sample in samples])
        response_lengths = np.array([num_sampled(sample.response.generation) for sample in samples])
        speed = self._telemetry.throughput(
            "rollout",
            int(response_lengths.sum()),
            seconds,
            lambda work: work.generate(prompt_lengths, response_lengths, self._config.rollout.samples_per_prompt),
        )
        return speed | usage.metrics | self._telemetry.memory(self.engine.take_peak_memory())

    def _sampling(self, config: RolloutConfig | EvalConfig, max_response_tokens: int) -> Sampling:
        return Sampling(
            max_response_tokens=max_response_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            stop_token_ids=self._stop_token_ids,
            stop=self._config.rollout.stop,
            keeps_mask=not isinstance(config, EvalConfig) and config.sampling_mask,
        )

    def _check_version(self, version: int) -> None:
        require_awake(self.engine)
        if self.engine.version != version:
            raise VersionError(
                f"rollout worker {self._number} holds policy version {self.engine.version}, not the expected "
                f"{version}; publish that version to it first"
            )
