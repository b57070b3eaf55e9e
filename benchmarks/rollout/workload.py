"""What all engines are asked for: prompts, samples of each, and when a response ends."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.train.models import SIZES as TRAIN_SIZES
from infra.engines.base import GenerationRequest, Sampling
from rl_core.rollout.seeding import derive_seed
from schemas.errors import ConfigError

EQUAL, VARIED = "equal", "varied"
MEAN_DIVISOR = 4  # varied responses are about 1 / MEAN_DIVISOR of the longest, on average

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the least that vLLM's CPU kernels take
    },
    "small": TRAIN_SIZES["small"],
    "mid": TRAIN_SIZES["mid"],
}


@dataclass(frozen=True)
class Workload:
    """Prompts and sampling; at temperature 1 without truncation."""

    prompts: tuple[tuple[int, ...], ...]
    num_samples: int  # of each prompt
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """How many responses are wanted."""
        return len(self.prompts) * self.num_samples

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn, as our engines take it."""
        return Sampling(self.max_response_tokens, stop_token_ids=self.stop_token_ids)

    def requests(self, repetition: int) -> list[GenerationRequest]:
        """The prompts with seeds of their own in every repetition."""
        return [
            GenerationRequest(
                np.array(prompt), tuple(derive_seed(repetition, row, sample) for sample in range(self.num_samples))
            )
            for row, prompt in enumerate(self.prompts)
        ]


def make_workload(
    case: str, vocab_size: int, num_prompts: int, num_samples: int, prompt_tokens: int, response_tokens: int
) -> Workload:
    """Random prompts.

    In the case `equal`, all prompts and all responses are of one length. In `varied`, prompts have half to one and
    a half times `prompt_tokens`, and a share of the vocabulary ends a response: of a model with random weights, which
    draws all tokens about equally often, response lengths are geometric, cut off at `response_tokens`.
    """
    rng = np.random.default_rng(0)
    if case == EQUAL:
        lengths, stop_token_ids = np.full(num_prompts, prompt_tokens), ()
    else:
        lengths = rng.integers(prompt_tokens // 2, prompt_tokens * 3 // 2, num_prompts, endpoint=True)
        stop_token_ids = tuple(range(0, vocab_size, max(2, response_tokens // MEAN_DIVISOR)))
    prompts = tuple(tuple(rng.integers(0, vocab_size, length).tolist()) for length in lengths)
    return Workload(prompts, num_samples, response_tokens, stop_token_ids)


def size_of(name: str) -> dict[str, Any]:
    """The fields of a Qwen3 config of one of `SIZES`.

    Raises:
        ConfigError: No such size.
    """
    if name not in SIZES:
        raise ConfigError(f"--models: {name!r} is none of {', '.join(SIZES)}")
    return SIZES[name]
