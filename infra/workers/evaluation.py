"""Generate and score the responses to held-out prompts."""

from collections.abc import Sequence

from infra.datasets import PromptDataset
from infra.engines.base import Sampling
from infra.workers.samples import first_failure, num_sampled
from infra.workers.sampling import ResponseSampler, ResponseStart
from rl_core.rollout.evaluation import number_answers
from rl_core.rollout.seeding import derive_seed
from schemas.config.run import RunConfig
from schemas.step import EvalShard


class Evaluator:
    """Samples and scores responses to held-out prompts, as the config's `eval` section says.

    Args:
        config: The run's configuration.
        prompts: The held-out prompts.
        sampler: Samples with the weights to evaluate.
        sampling: How tokens are sampled.
    """

    def __init__(self, config: RunConfig, prompts: PromptDataset, sampler: ResponseSampler, sampling: Sampling) -> None:
        self._config, self._prompts, self._sampler, self._sampling = config, prompts, sampler, sampling

    @property
    def num_prompts(self) -> int:
        """The number of held-out prompts."""
        return len(self._prompts)

    def generate(self, rows: Sequence[int]) -> EvalShard:
        """Generate and score `eval.samples_per_prompt` responses to each of these held-out prompts, in one batch.

        They are a function of the config, the weights and the rows.
        """
        n = self._config.eval.samples_per_prompt
        seed, prompts = self._config.seed, [self._prompts[row] for row in rows]
        starts = [
            ResponseStart(
                prompt, row, derive_seed(seed, "eval", row, sample), derive_seed(seed, "eval environment", row)
            )
            for row, prompt in zip(rows, prompts, strict=True)
            for sample in range(n)
        ]
        _, responses, _ = self._sampler.sample(starts, self._sampling)
        outcomes = [response.outcome for response in responses]
        given = [response.answer for response in responses]
        return EvalShard(
            data_sources=tuple(prompt.data_source for prompt in prompts),
            rewards=tuple(outcome.reward for outcome in outcomes),
            answers=tuple(
                answer for first in range(0, len(given), n) for answer in number_answers(given[first : first + n])
            ),
            response_lengths=tuple(num_sampled(response.generation) for response in responses),
            finish_reasons=tuple(response.generation.finish_reason for response in responses),
            failure=first_failure(outcomes),
        )
