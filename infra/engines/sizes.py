"""The longest sequence of a run, its size in a program's KV cache, and the ranks that a model can have."""

import torch

from infra.engines.embedded.cache import cache_bytes_per_token
from infra.models.load import max_positions
from rl_core.model_folder import load_config
from schemas.config.model import ModelConfig
from schemas.config.rollout import ProcessRollout
from schemas.config.run import RunConfig
from schemas.errors import ConfigError

BLOCK_TOKENS = 32  # per block of vLLM's KV cache; a prompt's samples share its whole blocks


def max_model_len(config: RunConfig) -> int:
    """Return the most tokens of a prompt plus its response that a run can request and its model accepts."""
    of_eval = config.data.max_prompt_tokens + config.eval.max_response_tokens if config.eval.max_response_tokens else 0
    return min(max(config.max_row_tokens, of_eval), max_positions(config.model))


def cache_bytes_per_sequence(config: RunConfig, dtype: torch.dtype) -> int:
    """Return the KV-cache size of a run's longest sequence: whole blocks, plus the one that vLLM keeps empty."""
    num_blocks = -(-max_model_len(config) // BLOCK_TOKENS) + 1
    of_model = cache_bytes_per_token(load_config(config.model.path), dtype)
    return num_blocks * BLOCK_TOKENS * of_model * _num_cache_copies(config)


def check_tensor_parallel(model: ModelConfig, rollout: ProcessRollout) -> None:
    """Check that the model's layers can be sharded over the engine's ranks.

    Raises:
        ConfigError: They can't; the message names numbers of ranks that work.
    """
    if not _divides(model, ranks := rollout.tensor_parallel):
        heads, kv_heads, width = _dimensions(model)
        works = tensor_parallel_sizes(model)
        raise ConfigError(
            f"rollout.tensor_parallel = {ranks} can't shard the model {model.path}, which has {heads} attention heads, "
            f"{kv_heads} key-value heads and an intermediate size of {width}; set it to "
            f"{', '.join(map(str, works[:-1]))}{' or ' if works[1:] else ''}{works[-1]}"
        )


def tensor_parallel_sizes(model: ModelConfig) -> list[int]:
    """Return the numbers of ranks over which a model's layers can be sharded, ascending."""
    return [count for count in range(1, _dimensions(model)[0] + 1) if _divides(model, count)]


def _num_cache_copies(config: RunConfig) -> int:
    """Return how many ranks of an engine hold the same keys and values: several if a model has fewer such heads."""
    _, num_kv_heads, _ = _dimensions(config.model)
    return max(1, config.rollout.gpus_per_worker // num_kv_heads)


def _divides(model: ModelConfig, ranks: int) -> bool:
    heads, kv_heads, width = _dimensions(model)
    return heads % ranks == 0 and width % ranks == 0 and max(kv_heads, ranks) % min(kv_heads, ranks) == 0


def _dimensions(model: ModelConfig) -> tuple[int, int, int]:
    """Return the number of attention heads and of key-value heads, and the width of the MLP (0: unknown)."""
    config = load_config(model.path).get_text_config(decoder=True)
    heads: int = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, getattr(config, "intermediate_size", None) or 0
