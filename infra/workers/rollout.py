"""The rollout worker: generates, scores and stores the groups of each step that it is assigned."""

from collections.abc import Sequence
from dataclasses import dataclass

from infra.datasets import load_prompts, load_train_prompts
from infra.datasets.limits import check_prompts
from infra.engines.base import Sampling
from infra.engines.open import open_engine
from infra.models.load import load_tokenizer, max_positions, num_embeddings, stop_token_ids
from infra.ray.device import choose_device, set_threads
from infra.ray.tracing import start_tracing, traced
from infra.rewards.open import open_reward_scorer
from infra.stores.base import ColumnStore
from infra.stores.open import open_store
from infra.weights.endpoint import WeightSyncEndpoint
from infra.workers.evaluation import Evaluator
from infra.workers.samples import Sample, make_shard, to_columns
from infra.workers.sampling import ResponseSampler
from rl_core.columns.codec import value_dtypes
from rl_core.rollout.seeding import derive_seed
from schemas.batch import ChunkKey
from schemas.config.rollout import EvalConfig, RolloutConfig
from schemas.errors import ConfigError, VersionError
from schemas.rollout import PutResult, RolloutShard
from schemas.step import EvalReport, ProcessGroupHandle, RunHandle
from schemas.weights import LoadedWeights, SentWeights, Transport, WeightGroupMember


@dataclass(frozen=True)
class _PendingShard:
    """The samples of one shard, until they are put."""

    policy_version: int
    samples: list[Sample]


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

    def __init__(self, run: RunHandle, number: int = 0, store: ColumnStore | None = None) -> None:
        self._run, self._config, self._number, self._store = run, run.config, number, store
        self._started = False
        self._pending: dict[tuple[int, int], _PendingShard] = {}  # by step and shard
        start_tracing(run.run_id, run.config, f"{type(self).__name__}-{number}")

    def start(self) -> None:
        """Load the starting weights (version 0), the prompts and the reward function, once.

        Raises:
            UserError: The model, a data file or the reward function is not usable, or the model's context is too short.
        """
        if self._started:
            return
        config = self._config
        set_threads(config.runtime.num_threads)
        self._columns = self._store or open_store(self._run)
        self._scorer = scorer = open_reward_scorer(config.reward)
        tokenizer = load_tokenizer(config.model)
        self._prompts = load_train_prompts(config.data, tokenizer)
        held_out = load_prompts(config.data.eval_path, config.data, tokenizer) if config.data.eval_path else None
        check_prompts(config, self._prompts, held_out, max_positions(config.model))
        self._vocab_size = num_embeddings(config.model)
        self._stop_token_ids = stop_token_ids(config.model, tokenizer) + config.rollout.stop_token_ids
        self.engine = open_engine(config, tokenizer)
        self._weight_sync = WeightSyncEndpoint(self._run.run_id, choose_device(), config.runtime)
        self._sampler = ResponseSampler(self.engine, scorer, tokenizer)
        limit = config.eval.max_response_tokens or config.rollout.max_response_tokens
        sampling = self._sampling(config.eval, limit)
        self._evaluator = Evaluator(config, held_out, self._sampler, sampling) if held_out is not None else None
        scorer.wait_until_ready()
        self._started = True

    def close(self) -> None:
        """Release the weights, and kill the reward processes."""
        self.engine.close()
        self._scorer.close()

    def version(self) -> int:
        """Return the policy version whose weights it holds."""
        return self.engine.version

    @traced("rl.sync")
    def load_weights(self, version: int, sent: SentWeights | None, transport: Transport) -> LoadedWeights:
        """Load the weights of policy `version`; pending rows are kept.

        Args:
            version: The version.
            sent: What the policy's `send_weights` returned; None for a broadcast.
            transport: The transport by which they are sent.

        Raises:
            WeightsError: They are damaged, or of another version or model; the engine is unchanged.
            WorkerLostError: The policy is gone.
        """
        return self._weight_sync.load(self.engine, version, sent, transport)

    def weight_group_member(self) -> WeightGroupMember:
        """Return its GPU and the weight group that it is in."""
        return self._weight_sync.member()

    def init_weight_group(self, group: ProcessGroupHandle, rank: int) -> None:
        """Join a weight group as rank 1 or higher."""
        self._weight_sync.join(group, rank)

    def generate(self, step: int, policy_version: int, shard: int, groups: Sequence[int]) -> RolloutShard:
        """Generate and score the samples of these groups of `step` together, and keep them for `put`.

        Args:
            step: The step.
            policy_version: The version that samples.
            shard: The number of these groups' shard within the step.
            groups: The groups' numbers within the step, ascending.

        Raises:
            VersionError: The worker doesn't hold `policy_version`.
        """
        self._check_version(policy_version)
        samples, seconds = self._sample(step, groups)
        self._pending = {key: pending for key, pending in self._pending.items() if key[0] >= step}
        self._pending[step, shard] = _PendingShard(policy_version, samples)
        return make_shard(shard, self._number, groups, samples, seconds)

    def has_shard(self, step: int, policy_version: int, shard: int) -> bool:
        """Return whether it has the rows of a shard, generated but not put yet."""
        pending = self._pending.get((step, shard))
        return pending is not None and pending.policy_version == policy_version

    def put(self, step: int, shard: int, kept: Sequence[int], reward_parts: Sequence[str]) -> PutResult:
        """Store the samples of a shard's kept groups as one chunk, and drop the shard from this worker.

        Args:
            step: The step.
            shard: The shard's number within the step.
            kept: The groups that the step keeps.
            reward_parts: The reward parts of all the step's samples, so that all chunks have the same columns.

        Raises:
            StoreError: The store rejects the chunk; the worker keeps the shard.
        """
        pending = self._pending[step, shard]
        samples = [sample for sample in pending.samples if sample.group_id in kept]
        columns = to_columns(samples, pending.policy_version, self._vocab_size, reward_parts)
        key = ChunkKey(run_id=self._run.run_id, step=step, stage="rollout", shard=shard)
        chunk = self._columns.put(key, columns)
        self._columns.flush()
        del self._pending[step, shard]
        return PutResult(chunk=chunk, dtypes=value_dtypes(columns), traffic=self._columns.take_traffic("put"))

    def evaluate(self, policy_version: int) -> EvalReport:
        """Evaluate the weights on the held-out prompts; see `Evaluator.evaluate`.

        Raises:
            ConfigError: `data.eval_path` is not set.
            VersionError: The worker doesn't hold `policy_version`.
            RewardFailureError: More rewards failed than the config allows.
        """
        if self._evaluator is None:
            raise ConfigError("data.eval_path is not set; set it to a file of held-out prompts to evaluate on")
        self._check_version(policy_version)
        return self._evaluator.evaluate(policy_version)

    def _sample(self, step: int, groups: Sequence[int]) -> tuple[list[Sample], dict[str, float]]:
        """Generate and score the samples of `groups`; also return the seconds of each part."""
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

    def _check_version(self, version: int) -> None:
        if self.engine.version != version:
            raise VersionError(
                f"rollout worker {self._number} holds policy version {self.engine.version}, not the expected "
                f"{version}; publish that version to it first"
            )
