"""The rollout worker: generates, scores and stores its share of every step's samples."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from safetensors.torch import load

from infra.datasets import PromptRow, load_prompts, load_train_prompts
from infra.engines.base import Generation, GenerationRequest, Sampling, generate_all
from infra.engines.noise import derive_seed
from infra.engines.transformers import TransformersEngine
from infra.models import load_model, load_tokenizer, stop_token_ids
from infra.preflight import check_prompts
from infra.rewards import open_scorer
from infra.stores.base import ColumnStore
from infra.stores.open import open_store
from infra.stores.plasma import ChunkWriter
from infra.workers.device import choose_device, set_threads
from infra.workers.samples import Sample, first_failure, to_columns, to_shard
from rl_core.columns.codec import value_dtypes
from rl_core.rewards import RewardItem, RewardOutcome
from rl_core.validation import HeldOutSample, report_source
from schemas.batch import ChunkKey
from schemas.errors import ConfigError, VersionError
from schemas.rollout import PutResult, RolloutShard, Round, check_failures
from schemas.step import EvalReport, RunHandle

logger = logging.getLogger(__name__)


class RolloutWorker(ChunkWriter):
    """One of the run's `rollout.num_workers` rollout workers.

    It generates the groups (a prompt's samples) that it is asked for by their numbers within the step. What they are
    is a function of the config, the policy version, the step and the number, not of who generates them, nor when.

    Args:
        run: The run it belongs to.
        shard: Its number s.
        store: The column store; None connects to the run's.
    """

    def __init__(self, run: RunHandle, shard: int = 0, store: ColumnStore | None = None) -> None:
        self._run, self._config, self._shard, self._store = run, run.config, shard, store
        self._started = False
        self._held: dict[tuple[int, tuple[int, ...]], list[Sample]] = {}  # by step, the last one, and groups asked for

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
        self._scorer = open_scorer(config.reward)
        self._tokenizer = load_tokenizer(config.model)
        self._prompts = load_train_prompts(config.data, self._tokenizer)
        self._eval_prompts = (
            load_prompts(config.data.eval_path, config.data, self._tokenizer) if config.data.eval_path else None
        )
        model = load_model(config.model)
        model.to(choose_device())  # type: ignore[arg-type]  # its decorator hides that a device will do
        check_prompts(config, self._prompts, self._eval_prompts, model.config.get_text_config().max_position_embeddings)
        self._vocab_size = model.config.get_text_config().vocab_size
        self._stop_token_ids = stop_token_ids(model, self._tokenizer)
        self._engine = TransformersEngine(model)
        self._scorer.wait_until_ready()
        self._started = True

    def version(self) -> int:
        """Return the policy version whose weights it holds."""
        return self._engine.version

    def load_weights(self, data: bytes, version: int) -> None:
        """Take the weights of policy `version`, as safetensors bytes by parameter name."""
        self._engine.load_weights(load(data), version)
        self._held = {}

    def generate(self, step: int, policy_version: int, groups: Sequence[int]) -> RolloutShard:
        """Generate and score the samples of these groups of `step`, and hold them for `put`.

        Args:
            step: The step.
            policy_version: The version that samples.
            groups: Numbers of groups within the step, ascending.

        Raises:
            VersionError: It doesn't hold `policy_version`.
        """
        self._expect(policy_version)
        samples, seconds = self._sample(step, groups)
        self._held = {held: rows for held, rows in self._held.items() if held[0] == step}
        self._held[step, tuple(groups)] = samples
        return to_shard(self._shard, groups, samples, seconds)

    def put(self, step: int, policy_version: int, rounds: Sequence[Round], reward_parts: Sequence[str]) -> PutResult:
        """Store the samples of the kept groups of `step` as one chunk, and let go of the step's samples.

        Samples that it doesn't hold (it was started anew, or has put them) it generates again, the same ones.

        Args:
            step: The step.
            policy_version: The version that sampled.
            rounds: What this worker was asked for, and which groups are kept: the chunk's rows, in this order.
            reward_parts: The reward parts of all workers' samples, so that all chunks have the same columns.

        Raises:
            VersionError: It doesn't hold `policy_version`.
            StoreError: The store refuses the chunk.
        """
        self._expect(policy_version)
        samples = [
            sample
            for entry in rounds
            if entry.kept
            for sample in self._held_or_again(step, entry.groups)
            if sample.group_id in entry.kept
        ]
        columns = to_columns(samples, policy_version, self._vocab_size, reward_parts)
        key = ChunkKey(run_id=self._run.run_id, step=step, stage="rollout", shard=self._shard)
        chunk = self._columns.put(key, columns)
        self._columns.flush()
        self._held = {}
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
        self._expect(policy_version)
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
        config = self._config.eval
        requests = [
            GenerationRequest(
                prompt.prompt_ids, tuple(derive_seed(self._config.seed, "eval", row, sample) for sample in range(n))
            )
            for row, prompt in enumerate(prompts)
        ]
        sampling = replace(
            self._sampling(config.temperature, config.top_p, config.top_k),
            max_response_tokens=config.max_response_tokens or self._config.rollout.max_response_tokens,
        )
        generations = generate_all(self._engine, requests, sampling)
        texts, outcomes = self._score([prompt for prompt in prompts for _ in range(n)], generations)
        check_failures(
            [outcome.reward for outcome in outcomes],
            first_failure(outcomes),
            self._config.reward.max_failure_fraction,
            "the evaluation",
        )
        samples = [
            HeldOutSample(text, outcome.reward, len(generation.token_ids), generation.finish_reason == "length")
            for text, outcome, generation in zip(texts, outcomes, generations, strict=True)
        ]
        return [samples[first : first + n] for first in range(0, len(samples), n)]

    def _held_or_again(self, step: int, groups: tuple[int, ...]) -> list[Sample]:
        if (step, groups) not in self._held:
            logger.info("step %d: the samples of groups %s are not held; generating them again", step, groups)
            self._held[step, groups], _ = self._sample(step, groups)
        return self._held[step, groups]

    def _sample(self, step: int, groups: Sequence[int]) -> tuple[list[Sample], dict[str, float]]:
        """Generate and score the samples of `groups`; also return the seconds that each part took."""
        rollout, started = self._config.rollout, time.perf_counter()
        rows = self._prompts.rows_for_groups(
            step, groups, rollout.num_prompts, self._config.seed, self._config.data.shuffle
        )
        prompt_of = {group: self._prompts[row] for group, row in zip(groups, rows, strict=True)}
        generations = generate_all(
            self._engine,
            [self._request(prompt_of[group], step, group) for group in groups],
            self._sampling(rollout.temperature, rollout.top_p, rollout.top_k),
        )
        generated = time.perf_counter()
        numbers = [(group, sample) for group in groups for sample in range(rollout.samples_per_prompt)]
        prompts = [prompt_of[group] for group, _ in numbers]
        texts, outcomes = self._score(prompts, generations)
        samples = [
            Sample(f"{step}-{group}-{sample}", group, prompt, generation, text, outcome)
            for (group, sample), prompt, generation, text, outcome in zip(
                numbers, prompts, generations, texts, outcomes, strict=True
            )
        ]
        return samples, {"generate": generated - started, "reward": time.perf_counter() - generated}

    def _request(self, prompt: PromptRow, step: int, group: int) -> GenerationRequest:
        # Seeded by the group's number within the step, not by its row: a small file may give one row twice.
        count = self._config.rollout.samples_per_prompt
        seeds = tuple(derive_seed(self._config.seed, "train", step, group, sample) for sample in range(count))
        return GenerationRequest(prompt.prompt_ids, seeds)

    def _sampling(self, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampling:
        return Sampling(
            max_response_tokens=self._config.rollout.max_response_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_token_ids=self._stop_token_ids,
        )

    def _score(
        self, prompts: Sequence[PromptRow], generations: Sequence[Generation]
    ) -> tuple[list[str], list[RewardOutcome]]:
        """Return the responses' texts and their rewards."""
        texts = [str(self._tokenizer.decode(g.token_ids, skip_special_tokens=True)) for g in generations]
        items = [
            RewardItem(prompt.prompt_text, text, prompt.answer, prompt.info)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return texts, self._scorer.score(items)

    def _expect(self, version: int) -> None:
        if self._engine.version != version:
            raise VersionError(
                f"rollout worker {self._shard} holds policy version {self._engine.version}, not the expected "
                f"{version}; publish that version to it first"
            )
