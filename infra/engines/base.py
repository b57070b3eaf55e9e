"""The protocol of rollout engines, and what they take and return. Imports no torch."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from schemas.config.model import ModelConfig
from schemas.errors import VersionError, WeightsError
from schemas.metrics import Max, Mean, Metrics, Sum
from schemas.placement import EngineTag, MemoryChange
from schemas.rollout import FinishReason

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PreTrainedTokenizerBase

    from schemas.weights import TensorSpec


@dataclass(frozen=True)
class EngineModel:
    """The model that an engine runs."""

    config: ModelConfig  # the model
    max_tokens: int  # the most tokens of a prompt plus its response
    # Its tokenizer, by which the embedded engine finds stop strings; a program loads it itself.
    tokenizer: "PreTrainedTokenizerBase | None" = None
    is_colocated: bool = False  # whether the engine shares its GPU
    sleeps: bool = False  # whether it gives up its memory while others need it; only on CUDA can it
    shared_memory: str | None = None  # `runtime.shared_memory`, through which a program gets adapters
    # How long a program may take to answer, but for its start (`timeouts.engine_seconds`).
    answer_seconds: float = 600.0


@dataclass
class EngineUsage:
    """How much of an engine is in use, over decoding steps; to measure a generation, give the engine a new one."""

    num_steps: int = 0
    running: int = 0  # rows that a step decodes, summed over the steps
    waiting: int = 0  # rows that have no place yet, summed over the steps
    peak_cache: float = 0.0  # the largest fraction of the KV cache in use
    prefilled: int = 0  # tokens that were computed but not sampled: prompts, and what environments answered

    def add(self, running: int, waiting: int, cache: float) -> None:
        """Add one decoding step."""
        self.num_steps, self.running, self.waiting = self.num_steps + 1, self.running + running, self.waiting + waiting
        self.peak_cache = max(self.peak_cache, cache)

    @property
    def metrics(self) -> Metrics:
        """The mean numbers of rows, the peak of the cache, and the prefilled tokens."""
        return {
            "engine/running": Mean(total=self.running, weight=self.num_steps),
            "engine/waiting": Mean(total=self.waiting, weight=self.num_steps),
            "engine/cache": Max(value=self.peak_cache),
            "engine/prefill_tokens": Sum(value=self.prefilled),
        }


@dataclass(frozen=True)
class Sampling:
    """The settings by which tokens are sampled.

    >>> Sampling(max_response_tokens=256, temperature=0.0).top_p  # greedy
    1.0
    """

    max_response_tokens: int  # the most tokens of one response, including its stop token
    temperature: float = 1.0  # the divisor of the logits; 0 takes the most likely token
    top_p: float = 1.0  # sample only from the most likely tokens that together reach this probability; 1 allows all
    top_k: int = 0  # sample only from this many most likely tokens; 0 allows all
    # Sample only from tokens of at least this fraction of the most likely token's probability; 0 allows all.
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()  # a response ends with the first of these tokens that is sampled
    stop: tuple[str, ...] = ()  # a response ends with the token that completes the first of these strings in it
    # Whether generations have the tokens that top-p, top-k and min-p leave, and log-probs over these.
    keeps_mask: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, and one seed per sample to generate.

    >>> GenerationRequest(prompt_ids=np.array([5, 6, 7]), seeds=(1, 2)).num_samples
    2
    """

    prompt_ids: np.ndarray  # [P] integers, P >= 1
    seeds: tuple[int, ...]  # one unsigned 64-bit seed per sample
    max_tokens: int | None = None  # of each of its responses, fewer than the sampling's; None: as many
    stop: tuple[str, ...] = ()  # more than the sampling's; an engine may go on after these

    @property
    def num_samples(self) -> int:
        """The number of responses to generate."""
        return len(self.seeds)

    def token_limit(self, sampling: Sampling) -> int:
        """Return the most tokens of one response."""
        return self.max_tokens or sampling.max_response_tokens


@dataclass(frozen=True)
class Generation:
    """One response of R tokens, at least 1 and at most its limit."""

    token_ids: np.ndarray  # int32 [R]; includes the token that stopped it if finish_reason is "stop"
    logprobs: np.ndarray  # float32 [R], nats: log-softmax(logits / temperature), before top-k, top-p and min-p unless
    # the sampling keeps its mask
    finish_reason: FinishReason
    versions: np.ndarray | None = None  # int32 [R], of the weights that sampled each token; None: one for all
    experts: "TokenExperts | None" = None  # None: the engine doesn't record them
    sampling_mask: "SamplingMask | None" = None  # None: the sampling doesn't keep it

    def beginning(self, size: int) -> "Generation":
        """Return its first tokens, 1 <= `size` <= R, as if the last of them had stopped it; of one set of weights."""
        mask = self.sampling_mask
        if mask is not None:
            counts = mask.counts[:size]
            mask = SamplingMask(counts, mask.token_ids[: counts.sum()])
        return Generation(self.token_ids[:size], self.logprobs[:size], "stop", sampling_mask=mask)


@dataclass(frozen=True)
class TokenExperts:
    """The experts that the engine chose for the P tokens of a prompt and the R of its response, C for each.

    The engine doesn't run a response's last token, and no log-prob depends on it: it has those of the prompt's last
    one.
    """

    prompt: np.ndarray  # [P, C] uint8, or uint16 if there are more than 256 experts
    response: np.ndarray  # [R, C], of the same dtype


@dataclass(frozen=True)
class SamplingMask:
    """The tokens that could be sampled at each of R positions: M together, always the sampled one among them."""

    counts: np.ndarray  # int32 [R], with sum M; 0 where no token was sampled, but an environment's follows
    token_ids: np.ndarray  # int32 [M], position after position, ascending within each


@dataclass(frozen=True)
class WeightsBucket:
    """Some of a version's weights, valid until the next bucket is taken."""

    tensors: "dict[str, torch.Tensor]"  # tensors by name, on any device; they are only read
    # That of the flat buffer (`infra.models.flat_tensors`) of which they are all the tensors, in its order.
    checksum: str
    file: "Path | None" = None  # the file that is this buffer, if there is one: an engine's other processes can map it


class DecodingRows(Protocol):
    """Rows that an engine decodes together with the weights of one version; some may join while others decode.

    A sample depends on the tokens before it, its seed, the weights and the sampling, but not on the other rows, up to
    the last bits. The same calls in the same order give the same samples, bit for bit.
    """

    @property
    def num_unfinished(self) -> int:
        """The number of rows whose turn has not ended, whether they are decoded yet or not."""
        ...

    def begin(self, requests: Sequence[GenerationRequest]) -> range:
        """Add a row per sample: request by request, in the order of their seeds. A request is prefilled once.

        Returns:
            Their numbers, which follow those of earlier rows.

        Raises:
            ValueError: A prompt is empty or too long.
        """
        ...

    def extend(self, row: int, token_ids: np.ndarray, seed: int, max_tokens: int, stop: tuple[str, ...] = ()) -> None:
        """Add the next turn of a row whose turn has ended: its tokens so far are not computed again, if there is room.

        Args:
            row: The row's number.
            token_ids: Integers [Q], Q >= 0: what follows the tokens that it has sampled.
            seed: Of the tokens that it samples next.
            max_tokens: The most of them, at least 1 and at most the sampling's.
            stop: See `GenerationRequest`.

        Raises:
            ValueError: It gets too long.
        """
        ...

    def branch(self, row: int, request: GenerationRequest) -> int:
        """Add the next turn of a row whose turn has ended, after other tokens than its own; return its new number.

        Those that an earlier turn of the row began with, too, are not computed again, if there is room to keep them and
        the model's layers can give them up one by one.

        Args:
            row: The row's number.
            request: All tokens before the turn, and one seed.

        Raises:
            ValueError: It is empty or too long.
        """
        ...

    def step(self) -> list[tuple[int, Generation]]:
        """Sample a token for each row that has a place; return the rows whose turn ends with it, and what they sampled.

        Raises:
            NonFiniteError: The model's logits are not finite.
            EngineLostError: A process of the engine died; it has closed.
        """
        ...

    def end(self, row: int) -> None:
        """Forget a row whose turn has ended."""
        ...

    def close(self) -> None:
        """Forget all rows, whether their turns have ended or not."""
        ...


class RolloutEngine(Protocol):
    """Generates responses with the weights of one policy version."""

    # The policy version of its weights; None if they are not all of one version, after a load that failed, or if
    # they are gone, as the engine slept without keeping them.
    version: int | None
    dtype: str  # the dtype of its weights, by torch's name
    verifies_buckets: bool  # by their checksums; else they are verified before it has them
    asleep: frozenset[EngineTag]  # the parts that are out of the device's memory
    usage: EngineUsage  # how much of it was in use

    def open_rows(self, sampling: Sampling, *, several_turns: bool = False) -> DecodingRows:
        """Return a decoder without rows, to be closed before the next one is opened.

        Nothing is computed before its first step.

        Raises:
            EngineLostError: A process of the engine died; it has closed.
            ValueError: The engine can't sample so.
            VersionError: It is asleep, or has no weights.
        """
        ...

    def load_weights(
        self, specs: "Sequence[TensorSpec]", buckets: Iterable[WeightsBucket], version: int, *, is_complete: bool = True
    ) -> None:
        """Copy weights into the engine's in place, bucket by bucket; from then on it generates as policy `version`.

        From the first bucket to the end of the last one, the engine has no version. If taking a bucket raises, it is
        left without one, and can load again.

        Args:
            specs: All the tensors of the buckets, in order.
            buckets: The buckets; the engine takes one after it has copied the one before.
            version: Their policy version.
            is_complete: Whether they are all of the model's weights; else, the engine keeps the others.

        Raises:
            WeightsError: A name or shape is not the model's, or a weight is missing; nothing has been copied.
            EngineLostError: A process of the engine died; it has closed.
        """
        ...

    def sleep(self, tags: Collection[EngineTag]) -> MemoryChange:
        """Give up the device memory of these parts, until `wake`; no request may be unfinished.

        Values are dropped: the next publish brings weights, and a cache is empty at the start of a call anyway. Only
        an engine that is sent adapters keeps its weights, in host memory, and with them its version. What an engine
        can't give up is reported as kept, and stays usable.
        """
        ...

    def wake(self, tags: Collection[EngineTag]) -> MemoryChange:
        """Allocate the device memory of these parts again; parts that are awake stay as they are.

        Raises:
            EngineLostError: It can't; the engine has closed.
        """
        ...

    def score(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        """Return the log-probs of given tokens: float32 [T - 1], nats, of all but the first.

        The engine must be awake. Samples of later calls don't depend on it.

        Args:
            token_ids: Integers [T], T >= 2.
            temperature: The divisor of the logits.

        Raises:
            EngineLostError: A process of the engine died; it has closed.
        """
        ...

    def check(self) -> None:
        """Check that the engine has not lost a process.

        Raises:
            EngineLostError: It has; another engine must be started.
        """
        ...

    def take_peak_memory(self) -> dict[str, int]:
        """Return the peak memory of its process, or of that of its processes which took most, in bytes by kind.

        See `rl_core.telemetry.take_peak_memory`.

        Raises:
            EngineLostError: A process of the engine died; it has closed.
        """
        ...

    def close(self) -> None:
        """Release the weights and the KV cache; the engine can't generate afterwards."""
        ...


def generate(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], sampling: Sampling
) -> Iterator[tuple[int, Generation]]:
    """Yield each sample with its number as soon as it is finished.

    Samples are numbered request by request, in the order of their seeds. Nothing is computed until the next sample is
    requested; if the caller closes the iterator, what is unfinished is dropped.

    Raises:
        EngineLostError: A process of the engine died; it has closed.
        NonFiniteError: The model's logits are not finite.
        ValueError: A prompt is empty or too long, or the engine can't sample so.
        VersionError: The engine is asleep, or has no weights.
    """
    with closing(engine.open_rows(sampling)) as rows:
        rows.begin(requests)
        while rows.num_unfinished:
            yield from rows.step()


def generate_all(engine: RolloutEngine, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Generation]:
    """Return the samples of all requests: request by request, in the order of each request's seeds."""
    return [generation for _, generation in sorted(generate(engine, requests, sampling), key=lambda item: item[0])]


def require_awake(engine: RolloutEngine) -> None:
    """Check that an engine can generate.

    Raises:
        VersionError: It is asleep, or has no weights.
    """
    if engine.asleep:
        parts = " and ".join(sorted(engine.asleep))
        raise VersionError(f"the engine is asleep ({parts} released): wake it and publish weights first")
    if engine.version is None:
        raise VersionError("the engine has no weights: publish some first")


def check_prompts(requests: Sequence[GenerationRequest], sampling: Sampling, max_tokens: int | None = None) -> None:
    """Check that an engine can take all requests.

    Args:
        requests: The requests.
        sampling: How many tokens they may get.
        max_tokens: The most tokens of prompt and response; None: any number.

    Raises:
        ValueError: A prompt is empty or too long.
    """
    for index, request in enumerate(requests):
        length, limit = len(request.prompt_ids), request.token_limit(sampling)
        if length == 0:
            raise ValueError(f"request {index} has an empty prompt; a model needs at least one token to continue")
        if max_tokens is not None and length > max_tokens - limit:
            raise ValueError(
                f"request {index} has a prompt of {length} tokens, but with {limit} response tokens the engine accepts "
                f"prompts of at most {max_tokens - limit}"
            )


def check_held(version: int | None, *, is_complete: bool) -> None:
    """Check that an engine that keeps some of its weights has a version.

    Raises:
        WeightsError: It has none.
    """
    if version is None and not is_complete:
        raise WeightsError("an engine without a version was sent changed weights only; publish all of them to it")
