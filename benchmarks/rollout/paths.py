"""The engines, each used as a trainer that needs the sampled tokens' log-probs would use it."""

import time
from abc import ABC, abstractmethod
from pathlib import Path as FilePath
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.rollout.workload import Workload
from infra.engines.base import EngineModel, generate_all
from infra.engines.embedded.engine import TransformersEngine
from infra.engines.vllm.start import open_vllm
from infra.models.load import load_model
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmRollout

CACHE_BYTES = 2**31


class Response(NamedTuple):
    """One response of R tokens."""

    token_ids: np.ndarray  # integers [R]
    logprobs: np.ndarray  # floating point [R], nats


class RolloutPath(ABC):
    """One engine with the weights of a model folder; a workload's responses are in the order of its prompts."""

    name: ClassVar[str]
    logprobs: ClassVar[str]  # the source of its log-probs

    def __init__(self, folder: FilePath, max_tokens: int, max_rows: int, python: str | None) -> None:
        """Start the engine.

        Args:
            folder: The model folder.
            max_tokens: The maximum number of tokens of a prompt and its response.
            max_rows: The maximum number of concurrent responses.
            python: The interpreter with vLLM; only vLLM's path needs it.

        Raises:
            ConfigError: The engine can't run here, or can't run this model.
        """
        self.model = load_model(ModelConfig(path=str(folder)))
        # The workload decides where responses end, not the model folder.
        self.model.generation_config = GenerationConfig()
        self.model.config.eos_token_id = None

    @abstractmethod
    def generate(self, workload: Workload, repetition: int) -> list[Response]:
        """Generate a workload's responses, different ones in every repetition.

        Raises:
            ConfigError: The engine can't run this workload.
        """

    def measure(self, workload: Workload, repetition: int) -> tuple[list[Response], float]:
        """Return the responses, and the seconds that generating them took."""
        start = time.perf_counter()
        responses = self.generate(workload, repetition)
        return responses, time.perf_counter() - start

    def close(self) -> None:
        """Release the weights."""
        del self.model


class Sluice(RolloutPath):
    """The embedded engine."""

    name = "sluice"
    logprobs = "of each step's logits, by the sampler"

    def __init__(self, folder: FilePath, max_tokens: int, max_rows: int, python: str | None) -> None:
        super().__init__(folder, max_tokens, max_rows, python)
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

    def generate(self, workload: Workload, repetition: int) -> list[Response]:
        width = max(map(len, workload.prompts))
        input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in workload.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts])
        torch.manual_seed(repetition)
        with torch.inference_mode():
            output: Any = self.model.generate(
                input_ids,
                attention_mask=mask,
                generation_config=_generation_config(workload),
            )
            token_ids = output.sequences[:, width:]
            logprobs = torch.stack(
                [
                    scores.log_softmax(-1).gather(-1, token_ids[:, position, None])[:, 0]
                    for position, scores in enumerate(output.scores)
                ],
                dim=1,
            )
        return _truncate(token_ids.numpy(), logprobs.numpy(), workload.stop_token_ids)


class Vllm(RolloutPath):
    """vLLM."""

    name = "vllm"
    logprobs = "raw_logprobs of the sampled token"

    def __init__(self, folder: FilePath, max_tokens: int, max_rows: int, python: str | None) -> None:
        rollout = VllmRollout(python=python, cache_bytes=CACHE_BYTES, max_num_seqs=max_rows)
        self._engine = open_vllm(rollout, EngineModel(ModelConfig(path=str(folder)), max_tokens))

    def generate(self, workload: Workload, repetition: int) -> list[Response]:
        generations = generate_all(self._engine, workload.requests(repetition), workload.sampling)
        return [Response(generation.token_ids, generation.logprobs) for generation in generations]

    def close(self) -> None:
        self._engine.close()


PATHS: dict[str, type[RolloutPath]] = {path.name: path for path in (Sluice, Generate, Vllm)}


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, prompt: tuple[int, ...], response: np.ndarray) -> np.ndarray:
    """Return the log-probs [R] of `response` by one unpadded forward, with which all paths must agree."""
    tokens = torch.tensor([*prompt, *response.tolist()])
    logits = model(tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[len(prompt) :, None])[:, 0].numpy()


def _generation_config(workload: Workload) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=workload.max_response_tokens,
        eos_token_id=list(workload.stop_token_ids) or None,
        pad_token_id=0,
        num_return_sequences=workload.num_samples,
        return_dict_in_generate=True,
        output_scores=True,
        disable_compile=True,
    )


def _truncate(token_ids: np.ndarray, logprobs: np.ndarray, stop_token_ids: tuple[int, ...]) -> list[Response]:
    """Return the rows [N, R], each up to its first stop token."""
    responses = []
    for ids, values in zip(token_ids, logprobs, strict=True):
        stops = np.flatnonzero(np.isin(ids, stop_token_ids))
        length = stops[0] + 1 if len(stops) else len(ids)
        responses.append(Response(ids[:length], values[:length]))
    return responses
