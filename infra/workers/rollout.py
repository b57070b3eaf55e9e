"""The rollout worker: generates, scores and stores what it is asked for of every step's samples."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from infra.datasets import PromptRow, load_prompts, load_train_prompts
from infra.datasets.limits import check_prompts
from infra.engines.base import Sampling
from infra.engines.open import open_engine
from infra.models.load import load_tokenizer, max_positions, num_embeddings, stop_token_ids
from infra.ray.device import choose_device, set_threads
from infra.rewards.open import open_reward_scorer
from infra.stores.base import ColumnStore
from infra.stores.chunk_writer import ChunkWriter
from infra.stores.open import open_store
from infra.weights.base import ObjectRefs
from infra.weights.endpoint import WeightSyncEndpoint
from infra.workers.samples import Sample, first_failure, make_shard, to_columns
from infra.workers.sampling import ResponseSampler
from rl_core.columns.codec import value_dtypes
from rl_core.rollout.evaluation import HeldOutSample, report_source
from rl_core.rollout.seeding import derive_seed
from schemas.batch import ChunkKey
from schemas.config.rollout import EvalConfig, RolloutConfig
from schemas.errors import ConfigError, VersionError
from schemas.rollout import PutResult, RolloutShard, check_failures
from schemas.step import EvalReport, ProcessGroupHandle, RunHandle
from schemas.weights import LoadedWeights, Transport, WeightGroupMember

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _PendingShard:
    """The samples of one shard, until they are put."""

    policy_version: int
    samples: list[Sample]


class RolloutWorker(ChunkWriter):
    """One of the run's `rollout.num_workers` rollout workers.

    It generates the groups (a prompt's samples) that it is asked for by their numbers within the step. What they are
    is a function of the config, the policy version, the step and the numbers, not of who generates them, nor when.

    Args:
        run: The run it belongs to.
        number: Its number.
        store: The column store; None connects to the run's.
    """

    def __init__(self, run: RunHandle, number: int = 0, store: ColumnStore | None = None) -> None:
        self._run, self._config, self._number, self._store = run, run.config, number, store
        self._started = False
        self._held: dict[tuple[int, int], _PendingShard] = {}  # by step and shard

    def start(self) -> None:
        """Load the starting weights (version 0), the prompts and the reward function, once.

        Raises:
            UserError: The model, a data file or the reward function is not usable, or the model is too short.
        """
        if self._started:
            return
        config = self._config
        set_threads(config.runtime.num_threads)
        self._columns = self._store or open_store(self._run)
        self._scorer = scorer = open_reward_scorer(config.reward)
        tokenizer = load_tokenizer(config.model)
        self._prompts = load_train_prompts(config.data, tokenizer)
        self._eval_prompts = (
            load_prompts(config.data.eval_path, config.data, tokenizer) if config.data.eval_path else None
        )
        check_prompts(config, self._prompts, self._eval_prompts, max_positions(config.model))
        self._vocab_size = num_embeddings(config.model)
        self._stop_token_ids = stop_token_ids(config.model, tokenizer) + config.rollout.stop_token_ids
        self.engine = open_engine(config, tokenizer)
        timeout = config.runtime.collective_timeout_seconds
        self._weight_sync = WeightSyncEndpoint(self._run.run_id, choose_device(), timeout)
        self._sampler = ResponseSampler(self.engine, scorer, tokenizer)
        scorer.wait_until_ready()
        self._started = True

    def close(self) -> None:
        """Let go of the weights, and end the reward's processes."""
        self.engine.close()
        self._scorer.close()

    def version(self) -> int:
        """Return the policy version whose weights it holds."""
        return self.engine.version

    def load_weights(self, version: int, refs: ObjectRefs, transport: Transport) -> LoadedWeights:
        """Take the weights of policy `version`; rows that it holds stay.

        Args:
            version: The version.
            refs: Ray's references to what the policy's `send_weights` returns.
            transport: By which they travel.

        Raises:
            WeightsError: They are damaged, or of another version or model; the engine is as before.
            WorkerLostError: The policy is gone.
        """
        return self._weight_sync.load(self.engine, version, refs, transport)

    def weight_group_member(self) -> WeightGroupMember:
        """Where it computes, and in which group weights are broadcast to it."""
        return self._weight_sync.member()

    def init_weight_group(self, meeting: ProcessGroupHandle, rank: int) -> None:
        """Join a group in which weights are broadcast; its rank is 1 or more."""
        self._weight_sync.join(meeting, rank)

    def generate(self, step: int, policy_version: int, shard: int, groups: Sequence[int]) -> RolloutShard:
        """Generate and score the samples of these groups of `step` together, and hold them for `put`.

        Args:
            step: The step.
            policy_version: The version that samples.
            shard: The number of these groups' shard within the step.
            groups: Numbers of groups within the step, ascending.

        Raises:
            VersionError: It doesn't hold `policy_version`.
        """
        self._require_version(policy_version)
        samples, seconds = self._sample(step, groups)
        self._held = {key: held for key, held in self._held.items() if key[0] >= step}
        self._held[step, shard] = _PendingShard(policy_version, samples)
        return make_shard(shard, self._number, groups, samples, seconds)

    def has_shard(self, step: int, policy_version: int, shard: int) -> bool:
        """Whether it has the rows of a shard; it lets go of them when they are put."""
        held = self._held.get((step, shard))
        return held is not None and held.policy_version == policy_version

    def put(self, step: int, shard: int, kept: Sequence[int], reward_parts: Sequence[str]) -> PutResult:
        """Store the samples of the kept groups of a shard that it holds as one chunk, and let go of the shard.

        Args:
            step: The step.
            shard: The shard's number within the step.
            kept: The groups that the step keeps.
            reward_parts: The reward parts of all the step's samples, so that all chunks have the same columns.

        Raises:
            StoreError: The store refuses the chunk.
        """
        held = self._held[step, shard]
        samples = [sample for sample in held.samples if sample.group_id in kept]
        columns = to_columns(samples, held.policy_version, self._vocab_size, reward_parts)
        key = ChunkKey(run_id=self._run.run_id, step=step, stage="rollout", shard=shard)
        chunk = self._columns.put(key, columns)
        self._columns.flush()
        del self._held[step, shard]
        return PutResult(chunk=chunk, dtypes=value_dtypes(columns), traffic=self._columns.take_traffic("put"))

    def evaluate(self, policy_version: int) -> EvalReport:
        """Score `eval.samples_per_prompt` responses to each held-out prompt, sampled as `eval` says.

        The samples of a prompt are a function of the config, the policy version and its row. Failed rewards count
        neither as right nor as wrong.

        Raises:
            ConfigError: There is no `data.eval_path`.
            VersionError: It doesn't hold `policy_version`.
            RewardFailureError: More rewards failed than the config allows.
        """
        if self._eval_prompts is None:
            raise ConfigError("data.eval_path is not set; set it to a file of held-out prompts to evaluate on")
        self._require_version(policy_version)
        started = time.perf_counter()
        config, count = self._config.eval, min(self._config.eval.num_prompts, len(self._eval_prompts))
        n, threshold = config.samples_per_prompt, config.accuracy_threshold
        prompts = [self._eval_prompts[row] for row in range(count)]
        samples = self._sample_held_out(prompts, n)
        of_source: dict[str, list[Sequence[HeldOutSample]]] = {}
        for prompt, drawn in zip(prompts, samples, strict=True):
            of_source.setdefault(prompt.data_source, []).append(drawn)
        total = report_source("all", samples, n, threshold)
        assert total.mean_at_n is not None  # some reward succeeded, as was checked
        assert total.reward is not None
        return EvalReport(
            policy_version=policy_version,
            num_prompts=len(prompts),
            samples_per_prompt=n,
            accuracy=total.mean_at_n,
            reward=total.reward,
            num_failed=total.num_failed,
            seconds=time.perf_counter() - started,
            sources=tuple(report_source(name, drawn, n, threshold) for name, drawn in of_source.items()),
        )

    def _sample_held_out(self, prompts: Sequence[PromptRow], n: int) -> list[list[HeldOutSample]]:
        """Generate and score n samples of each prompt, by prompt."""
        seeds = [
            tuple(derive_seed(self._config.seed, "eval", row, sample) for sample in range(n))
            for row in range(len(prompts))
        ]
        config = self._config.eval
        limit = config.max_response_tokens or self._config.rollout.max_response_tokens
        responses, _ = self._sampler.sample(prompts, seeds, self._sampling(config, limit))
        outcomes = [response.outcome for response in responses]
        check_failures(
            [outcome.reward for outcome in outcomes],
            first_failure(outcomes),
            self._config.reward.max_failure_fraction,
            "the evaluation",
        )
        samples = [
            HeldOutSample(
                response.text,
                response.outcome.reward,
                len(response.generation.token_ids),
                response.generation.finish_reason == "length",
            )
            for response in responses
        ]
        return [samples[first : first + n] for first in range(0, len(samples), n)]

    def _sample(self, step: int, groups: Sequence[int]) -> tuple[list[Sample], dict[str, float]]:
        """Generate and score the samples of `groups`; also return the seconds that each part took."""
        config, rollout = self._config, self._config.rollout
        rows = self._prompts.rows_for_groups(step, groups, rollout.num_prompts, config.seed, config.data.shuffle)
        prompts = [self._prompts[row] for row in rows]
        # Seeded by the group's number within the step, not by its row: a small file may give one row twice.
        numbers = range(rollout.samples_per_prompt)
        seeds = [tuple(derive_seed(config.seed, "train", step, group, n) for n in numbers) for group in groups]
        responses, seconds = self._sampler.sample(prompts, seeds, self._sampling(rollout, rollout.max_response_tokens))
        of_sample = [(group, prompt, n) for group, prompt in zip(groups, prompts, strict=True) for n in numbers]
        samples = [
            Sample(f"{step}-{group}-{n}", group, prompt, response)
            for (group, prompt, n), response in zip(of_sample, responses, strict=True)
        ]
        return samples, seconds

    def _sampling(self, config: RolloutConfig | EvalConfig, max_response_tokens: int) -> Sampling:
        return Sampling(
            max_response_tokens=max_response_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            stop_token_ids=self._stop_token_ids,
            stop=self._config.rollout.stop,
        )

    def _require_version(self, version: int) -> None:
        if self.engine.version != version:
            raise VersionError(
                f"rollout worker {self._number} holds policy version {self.engine.version}, not the expected "
                f"{version}; publish that version to it first"
            )
