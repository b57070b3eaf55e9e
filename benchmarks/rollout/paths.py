"""The engines, each used in the way a trainer would that needs the drawn tokens' log-probs."""

import time
from abc import ABC, abstractmethod
from pathlib import Path as FilePath
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from benchmarks.rollout.vllm_process import VllmProcess
from benchmarks.rollout.workload import Workload
from infra.engines.base import generate_all
from infra.engines.transformers import TransformersEngine
from infra.models.load import load_model
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

PAGE_TOKENS = 32  # of a block of continuous batching's cache
PREFILL_TOKENS_PER_ROW = 32  # tokens of prompts that it computes in one step, by row


class Response(NamedTuple):
    """One response of R tokens."""

    token_ids: np.ndarray  # integers [R]
    logprobs: np.ndarray  # floating point [R], nats


class RolloutPath(ABC):
    """One engine with the weights of a model folder; a workload's responses come prompt by prompt."""

    name: ClassVar[str]
    logprobs: ClassVar[str]  # where its log-probs are from
    is_slow: ClassVar[bool] = False  # measured once: slow

    def __init__(self, folder: FilePath, max_tokens: int, max_rows: int) -> None:
        """Start it.

        Args:
            folder: The model folder.
            max_tokens: The most tokens of a prompt and its response.
            max_rows: The most responses at a time.

        Raises:
            ConfigError: It can't run here, or not this model.
        """
        self.model = load_model(ModelConfig(path=str(folder)))
        # Responses end as the workload says, not as the folder does.
        self.model.generation_config = GenerationConfig()
        self.model.config.eos_token_id = None

    @abstractmethod
    def generate(self, workload: Workload, repetition: int) -> list[Response]:
        """Generate a workload's responses, other ones in every repetition.

        Raises:
            ConfigError: It can't run this workload.
        """

    def measure(self, workload: Workload, repetition: int) -> tuple[list[Response], float]:
        """Return the responses and the seconds that they took."""
        start = time.perf_counter()
        responses = self.generate(workload, repetition)
        return responses, time.perf_counter() - start

    def close(self) -> None:
        """Let go of the weights."""
        del self.model


class Sluice(RolloutPath):
    """The embedded engine."""

    name = "sluice"
    logprobs = "of each step's logits, by the sampler"

    def __init__(self, folder: FilePath, max_tokens: int, max_rows: int) -> None:
        super().__init__(folder, max_tokens, max_rows)
        self._engine = TransformersEngine(self.model)

    def generate(self, workload: Workload, repetition: int) -> list[Response]:
        generations = generate_all(self._engine, workload.requests(repetition), workload.sampling)
        return [Response(generation.token_ids, generation.logprobs) for generation in generations]

    def close(self) -> None:
        self._engine.close()
        super().close()


class Generate(RolloutPath):
    """transformers' `generate` on a left-padded batch, with its default cache."""

    name = "generate"
    logprobs = "output_scores, then log-softmax"
    cache: ClassVar[str | None] = None

    def generate(self, workload: Workload, repetition: int) -> list[Response]:
        width = max(map(len, workload.prompts))
        input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in workload.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts])
        torch.manual_seed(repetition)
        with torch.inference_mode():
            output: Any = self.model.generate(
                input_ids,
                attention_mask=mask,
                generation_config=_generation_config(workload, cache_implementation=self.cache),
            )
            token_ids = output.sequences[:, width:]
            logprobs = torch.stack(
                [
                    scores.log_softmax(-1).gather(-1, token_ids[:, position, None])[:, 0]
                    for position, scores in enumerate(output.scores)
                ],
                dim=1,
            )
        return _cut(token_ids.numpy(), logprobs.numpy(), workload.stop_token_ids)


class GenerateStatic(Generate):
    """`generate` with a static cache, eagerly: compiling for a CPU takes longer than the runs here."""

    name = "generate_static"
    cache = "static"


class ContinuousBatching(RolloutPath):
    """transformers' continuous batching."""

    name = "continuous_batching"
    logprobs = "return_logprobs"
    is_slow = True

    def __init__(self, folder: FilePath, max_tokens: int, max_rows: int) -> None:
        super().__init__(folder, max_tokens, max_rows)
        # Left to itself, it takes nearly all memory that is free, which is meant for a GPU.
        self._sizes = {
            "page_size": PAGE_TOKENS,
            "num_blocks": max_rows * (-(-max_tokens // PAGE_TOKENS) + 1),
            "max_batch_tokens": max(max_rows * PREFILL_TOKENS_PER_ROW, max_tokens),
            "max_requests_per_batch": max_rows,
        }

    def generate(self, workload: Workload, repetition: int) -> list[Response]:
        outputs = self.model.generate_batch(
            [list(prompt) for prompt in workload.prompts for _ in range(workload.num_samples)],
            generation_config=_generation_config(
                workload, num_return_sequences=1, eos_token_id=list(workload.stop_token_ids) or -1
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                return_logprobs=True, seed=repetition, use_cuda_graph=False, **self._sizes
            ),
        )
        results = list(outputs.values())
        errors = [result.error for result in results if result.error]
        if errors or len(results) != workload.num_rows:
            raise ConfigError(f"{len(results)} of {workload.num_rows} responses; the first error: {errors[:1]}")
        return [Response(np.array(result.generated_tokens), np.array(result.logprobs)) for result in results]


class Vllm(RolloutPath):
    """vLLM, in a process of its own: it binds threads, and changes what its process inherits."""

    name = "vllm"
    logprobs = "raw_logprobs of the sampled token"

    def __init__(self, folder: FilePath, max_tokens: int, max_rows: int) -> None:
        self._process = VllmProcess(folder, max_tokens, max_rows, torch.get_num_threads())

    def generate(self, workload: Workload, repetition: int) -> list[Response]:
        return self.measure(workload, repetition)[0]

    def measure(self, workload: Workload, repetition: int) -> tuple[list[Response], float]:
        responses, seconds = self._process.generate(workload, repetition)
        return [Response(token_ids, logprobs) for token_ids, logprobs in responses], seconds

    def close(self) -> None:
        self._process.close()


PATHS: dict[str, type[RolloutPath]] = {
    path.name: path for path in (Sluice, Generate, GenerateStatic, ContinuousBatching, Vllm)
}


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, prompt: tuple[int, ...], response: np.ndarray) -> np.ndarray:
    """Log-probs [R] of `response` by one forward over the unpadded sequence, what all paths must agree with."""
    tokens = torch.tensor([*prompt, *response.tolist()])
    logits = model(tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[len(prompt) :, None])[:, 0].numpy()


def _generation_config(workload: Workload, **changes: Any) -> GenerationConfig:
    fields: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": workload.max_response_tokens,
        "eos_token_id": list(workload.stop_token_ids) or None,
        "pad_token_id": 0,
        "num_return_sequences": workload.num_samples,
        "return_dict_in_generate": True,
        "output_scores": True,
        "disable_compile": True,
    }
    return GenerationConfig(**{**fields, **changes})


def _cut(token_ids: np.ndarray, logprobs: np.ndarray, stop_token_ids: tuple[int, ...]) -> list[Response]:
    """Rows [N, R] up to their first stop token."""
    responses = []
    for ids, values in zip(token_ids, logprobs, strict=True):
        stops = np.flatnonzero(np.isin(ids, stop_token_ids))
        length = stops[0] + 1 if len(stops) else len(ids)
        responses.append(Response(ids[:length], values[:length]))
    return responses
