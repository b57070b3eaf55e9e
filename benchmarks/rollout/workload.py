"""The workload of all engines: prompts, samples per prompt, and stop tokens."""

from dataclasses import dataclass

import numpy as np

from infra.engines.base import GenerationRequest, Sampling
from rl_core.rollout.seeding import derive_seed

EQUAL, VARIED = "equal", "varied"
MEAN_DIVISOR = 4  # varied responses have about 1 / MEAN_DIVISOR of the maximum tokens on average


@dataclass(frozen=True)
class Workload:
    """Prompts and sampling, at temperature 1 without truncation."""

    prompts: tuple[tuple[int, ...], ...]
    num_samples: int  # per prompt
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """The number of responses."""
        return len(self.prompts) * self.num_samples

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters, for Sluice's engines."""
        return Sampling(self.max_response_tokens, stop_token_ids=self.stop_token_ids)

    def requests(self, repetition: int) -> list[GenerationRequest]:
        """Return the prompts, with different seeds in every repetition."""
        return [
            GenerationRequest(
                np.array(prompt), tuple(derive_seed(repetition, row, sample) for sample in range(self.num_samples))
            )
            for row, prompt in enumerate(self.prompts)
        ]


def make_workload(
    case: str, vocab_size: int, num_prompts: int, num_samples: int, prompt_tokens: int, response_tokens: int
) -> Workload:
    """Return a workload with random prompts.

    In the `equal` case, all prompts have the same length, and so have all responses. In the `varied` case, prompts have
    0.5 to 1.5 times `prompt_tokens`, and a fraction of the vocabulary are stop tokens. A model with random weights
    samples all tokens about equally often, so its response lengths are geometric, cut off at `response_tokens`.
    """
    rng = np.random.default_rng(0)
    if case == EQUAL:
        lengths, stop_token_ids = np.full(num_prompts, prompt_tokens), ()
    else:
        lengths = rng.integers(prompt_tokens // 2, prompt_tokens * 3 // 2, num_prompts, endpoint=True)
        stop_token_ids = tuple(range(0, vocab_size, max(2, response_tokens // MEAN_DIVISOR)))
    prompts = tuple(tuple(rng.integers(0, vocab_size, length).tolist()) for length in lengths)
    return Workload(prompts, num_samples, response_tokens, stop_token_ids)
