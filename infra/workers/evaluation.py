"""Evaluate a policy version on held-out prompts."""

import time
from collections.abc import Sequence

from infra.datasets import PromptDataset, PromptRow
from infra.engines.base import Sampling
from infra.workers.samples import first_failure
from infra.workers.sampling import ResponseSampler
from rl_core.rollout.evaluation import HeldOutSample, summarize_source
from rl_core.rollout.seeding import derive_seed
from schemas.config.run import RunConfig
from schemas.rollout import check_failures
from schemas.step import EvalReport


class Evaluator:
    """Samples and scores responses to held-out prompts, as the config's `eval` section says.

    Args:
        config: The run's configuration.
        prompts: The held-out prompts, of which the first `eval.num_prompts` are used.
        sampler: Samples with the weights to evaluate.
        sampling: How tokens are sampled.
    """

    def __init__(self, config: RunConfig, prompts: PromptDataset, sampler: ResponseSampler, sampling: Sampling) -> None:
        self._config, self._prompts, self._sampler, self._sampling = config, prompts, sampler, sampling

    def evaluate(self, policy_version: int) -> EvalReport:
        """Report the metrics of `eval.samples_per_prompt` responses to each prompt, of all prompts and by data source.

        The samples of a prompt are a function of the config, the policy version and the prompt's row. Failed rewards
        count as neither correct nor incorrect.

        Args:
            policy_version: The version of the sampler's weights.

        Raises:
            RewardFailureError: More rewards failed than the config allows.
        """
        started = time.perf_counter()
        n, threshold = self._config.eval.samples_per_prompt, self._config.eval.accuracy_threshold
        prompts = [self._prompts[row] for row in range(min(self._config.eval.num_prompts, len(self._prompts)))]
        samples = self._sample(prompts, n)
        by_source: dict[str, list[Sequence[HeldOutSample]]] = {}
        for prompt, of_prompt in zip(prompts, samples, strict=True):
            by_source.setdefault(prompt.data_source, []).append(of_prompt)
        total = summarize_source("all", samples, n, threshold)
        assert total.mean_at_n is not None  # `_sample` checks that some reward succeeded
        assert total.reward is not None
        return EvalReport(
            policy_version=policy_version,
            num_prompts=len(prompts),
            samples_per_prompt=n,
            accuracy=total.mean_at_n,
            reward=total.reward,
            num_failed=total.num_failed,
            seconds=time.perf_counter() - started,
            sources=tuple(summarize_source(name, of_source, n, threshold) for name, of_source in by_source.items()),
        )

    def _sample(self, prompts: Sequence[PromptRow], n: int) -> list[list[HeldOutSample]]:
        """Generate and score n samples of each prompt."""
        seeds = [
            tuple(derive_seed(self._config.seed, "eval", row, sample) for sample in range(n))
            for row in range(len(prompts))
        ]
        responses, _ = self._sampler.sample(prompts, seeds, self._sampling)
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
