"""What a rollout engine takes and gives back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from schemas.rollout import FinishReason


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        max_response_tokens: The most tokens of one response, its stop token included.
        temperature: What logits are divided by; 0 takes the likeliest token.
        top_p: Only the likeliest tokens that together reach this probability are drawn; 1 allows all.
        top_k: Only the this many likeliest tokens are drawn; 0 allows all.
        min_p: Only tokens of at least this share of the likeliest one's probability are drawn; 0 allows all.
        stop_token_ids: A response ends with the first of these that it draws.
        stop: A response ends with the token that completes the first of these texts in it.
    """

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, and a seed for each of the samples wanted of it."""

    prompt_ids: np.ndarray  # [P] integers, P >= 1
    seeds: tuple[int, ...]  # one unsigned 64-bit seed per sample

    @property
    def num_samples(self) -> int:
        """How many responses are wanted."""
        return len(self.seeds)


@dataclass(frozen=True)
class Generation:
    """One response of R tokens, 1 <= R <= max_response_tokens."""

    token_ids: np.ndarray  # int32 [R]; ends with what stopped it when finish_reason is "stop"
    logprobs: np.ndarray  # float32 [R], nats: log-softmax(logits / temperature), before top-k, top-p and min-p
    finish_reason: FinishReason


class RolloutEngine(Protocol):
    """Generates responses with the weights of one policy version."""

    version: int

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[tuple[int, Generation]]:
        """Yield each sample when it is finished, with its number: request by request, in the order of their seeds.

        A sample depends on its prompt, its seed, the weights and `sampling`, not on what it is batched with; its
        last bits may. The same requests in another call are the same samples, bit for bit.
        """
        ...

    def load_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy `state` into the engine's weights in place; from now on it generates as policy `version`.

        Raises:
            WeightsError: A name or shape isn't the model's, or a weight is missing; nothing has been copied.
        """
        ...

    def close(self) -> None:
        """Let go of the weights and the KV cache; it generates nothing any more."""
        ...


def generate_all(engine: RolloutEngine, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Generation]:
    """Return the samples of all requests: request by request, in the order of each one's seeds."""
    return [generation for _, generation in sorted(engine.generate(requests, sampling), key=lambda item: item[0])]
