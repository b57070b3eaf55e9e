"""The vLLM engine, in the calling process. vLLM is imported when an engine is started, and by no other package.

Contract of the log-probs: vLLM's raw log-probs are computed before the temperature is applied, its processed ones after
top-k, top-p and min-p. So the temperature is folded into the model's own logit scale and vLLM samples at temperature 1:
its raw log-probs are then log-softmax(logits / temperature), before any truncation.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from infra.engines.base import Generation, GenerationRequest, Sampling
from infra.engines.vllm.translate import generation, vllm_params
from infra.models.load import check_weights
from schemas.errors import ConfigError


class VllmEngine:
    """A `RolloutEngine` over vLLM.

    All requests of a call are added before the first step, and the prefix cache is emptied before each call, so that
    the samples of a call are a function of its requests, its sampling and the weights.

    Attributes:
        version: The policy version of the weights.
    """

    def __init__(self, engine: Any, eager: bool, shapes: PreTrainedModel, version: int = 0) -> None:
        """Wrap an engine, whose weights are those of policy `version`; see `open_vllm`.

        Args:
            engine: vLLM's `LLMEngine`, which steps in this process.
            eager: Don't let vLLM compile the small functions of its sampler.
            shapes: The transformers model with the same weight names, on the meta device.
            version: The policy version of its weights.
        """
        self._engine = engine
        self._shapes = shapes
        self._eager = eager
        self._scale = engine.apply_model(lambda model: _logits_processor(model).scale)[0]  # the model's own
        self.version = version

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[tuple[int, Generation]]:
        """Yield each sample with its number as soon as it is finished; see `RolloutEngine.generate`.

        If the caller closes the iterator, samples that are not finished are aborted.

        Raises:
            ValueError: A prompt is empty, or with `sampling.max_response_tokens` more too long for the engine.
            NonFiniteError: The model's logits are not finite.
        """
        self._check_prompts(requests, sampling)
        assert not self._engine.has_unfinished_requests(), "an engine generates for one caller at a time"
        was_emptied = self._engine.reset_prefix_cache()
        assert was_emptied, "blocks of the KV cache are in use without any requests"
        self._scale_logits(sampling.temperature)
        pending: dict[int, str] = {}  # vLLM's request ids, by sample number
        try:
            for number, (prompt, seed) in enumerate(
                (r.prompt_ids.tolist(), seed) for r in requests for seed in r.seeds
            ):
                pending[number] = self._add(str(number), prompt, vllm_params(sampling, seed))
            while pending:
                for output in self._step():
                    del pending[number := int(output.request_id)]
                    yield number, generation(output.outputs[0])
        finally:
            self._engine.abort_request(list(pending.values()), internal=True)
            self._step()  # informs the model runner of the finished requests, so that the next call finds it empty

    def load_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy `state` into the engine's weights in place; from then on it generates as policy `version`.

        Args:
            state: Tensors by the transformers model's state-dict names, of any floating dtype and on any device; for
                tied weights, one name is enough. They are only read.
            version: The policy version of `state`.

        Raises:
            WeightsError: A name or shape is not the model's, or a weight is missing; nothing has been copied.
        """
        check_weights(self._shapes, state, version)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(state.items())})
        self._engine.apply_model(_repack_head)
        self.version = version

    def close(self) -> None:
        """Release the weights and the KV cache; the engine can't generate afterwards."""
        self._engine.engine_core.shutdown()
        del self._engine
        gc.collect()  # the model runner and its caches refer to one another

    def _check_prompts(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
        longest = self._engine.model_config.max_model_len - sampling.max_response_tokens
        for index, request in enumerate(requests):
            if len(request.prompt_ids) == 0:
                raise ValueError(f"request {index} has an empty prompt; a model needs at least one token to continue")
            if len(request.prompt_ids) > longest:
                raise ValueError(
                    f"request {index} has a prompt of {len(request.prompt_ids)} tokens, but with "
                    f"{sampling.max_response_tokens} response tokens the engine accepts prompts of at most {longest}"
                )

    def _scale_logits(self, temperature: float) -> None:
        scale = self._scale / temperature if temperature > 0 else self._scale
        self._engine.apply_model(lambda model: setattr(_logits_processor(model), "scale", scale))

    def _add(self, name: str, prompt: list[int], params: Any) -> str:
        """Add one sample as a request, and return vLLM's own id for it."""
        from vllm.inputs.engine import tokens_input

        internal_id: str = self._engine.add_request(name, tokens_input(prompt), params)
        return internal_id

    def _step(self) -> list[Any]:
        """Run one forward pass of the scheduled requests, and return the outputs that it finished."""
        with no_compiling(self._eager):
            outputs: list[Any] = self._engine.step()
        return outputs


def no_compiling(eager: bool) -> AbstractContextManager[Any]:
    """If `eager`, run functions that vLLM decorates with `torch.compile` uncompiled: compiling takes 4 to 20 s."""
    return torch.compiler.set_stance("force_eager") if eager else nullcontext()


def _logits_processor(model: torch.nn.Module) -> Any:
    """Return the module that scales the model's logits."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if len(found) != 1:
        raise ConfigError(
            f"rollout.kind = 'vllm': vLLM's {type(model).__name__} has {len(found)} logits processors, expected 1; "
            "use rollout.kind = 'transformers' for this model"
        )
    return found[0]


def _repack_head(model: torch.nn.Module) -> None:
    """Repack the output head: if it is tied to the embeddings, vLLM's reload doesn't update a CPU's packed copy."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
