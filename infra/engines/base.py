"""The protocol of rollout engines, and what they take and return. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from schemas.rollout import FinishReason

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """The settings by which tokens are sampled.

    >>> Sampling(max_response_tokens=256, temperature=0.0)  # greedy
    Sampling(max_response_tokens=256, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, stop_token_ids=(), stop=())

    Attributes:
        max_response_tokens: The most tokens of one response, including its stop token.
        temperature: The divisor of the logits; 0 takes the most likely token.
        top_p: Sample only from the most likely tokens that together reach this probability; 1 allows all.
        top_k: Sample only from this many most likely tokens; 0 allows all.
        min_p: Sample only from tokens of at least this fraction of the most likely token's probability; 0 allows all.
        stop_token_ids: A response ends with the first of these tokens that is sampled.
        stop: A response ends with the token that completes the first of these strings in it.
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
    """One prompt, and one seed per sample to generate.

    >>> GenerationRequest(prompt_ids=np.array([5, 6, 7]), seeds=(1, 2)).num_samples
    2
    """

    prompt_ids: np.ndarray  # [P] integers, P >= 1
    seeds: tuple[int, ...]  # one unsigned 64-bit seed per sample

    @property
    def num_samples(self) -> int:
        """The number of responses to generate."""
        return len(self.seeds)


@dataclass(frozen=True)
class Generation:
    """One response of R tokens, 1 <= R <= max_response_tokens."""

    token_ids: np.ndarray  # int32 [R]; includes the token that stopped it if finish_reason is "stop"
    logprobs: np.ndarray  # float32 [R], nats: log-softmax(logits / temperature), before top-k, top-p and min-p
    finish_reason: FinishReason


class RolloutEngine(Protocol):
    """Generates responses with the weights of one policy version."""

    version: int

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[tuple[int, Generation]]:
        """Yield each sample with its number as soon as it is finished.

        Samples are numbered request by request, in the order of their seeds. A sample depends on its prompt, its seed,
        the weights and `sampling`, but not on the rest of its batch, up to the last bits. The same requests in another
        call give the same samples, bit for bit.
        """
        ...

    def load_weights(self, state: "Mapping[str, torch.Tensor]", version: int) -> None:
        """Copy `state` into the engine's weights in place; from then on it generates as policy `version`.

        Raises:
            WeightsError: A name or shape is not the model's, or a weight is missing; nothing has been copied.
        """
        ...

    def close(self) -> None:
        """Release the weights and the KV cache; the engine can't generate afterwards."""
        ...


def generate_all(engine: RolloutEngine, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Generation]:
    """Return the samples of all requests: request by request, in the order of each request's seeds."""
    return [generation for _, generation in sorted(engine.generate(requests, sampling), key=lambda item: item[0])]
