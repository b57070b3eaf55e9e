"""The longest sequence of a run under vLLM, and its size in the KV cache."""

import torch
from transformers import AutoConfig

from infra.engines.cache import cache_bytes_per_token
from infra.models.load import max_positions
from schemas.config.run import RunConfig

BLOCK_TOKENS = 32  # per block of the KV cache; a prompt's samples share its whole blocks


def max_model_len(config: RunConfig) -> int:
    """Return the most tokens of a prompt plus its response that a run can request and its model accepts."""
    response = max(config.rollout.max_response_tokens, config.eval.max_response_tokens or 0)
    return min(config.data.max_prompt_tokens + response, max_positions(config.model))


def cache_bytes_per_sequence(config: RunConfig, dtype: torch.dtype) -> int:
    """Return the KV-cache size of a run's longest sequence: whole blocks, plus the one that vLLM keeps empty."""
    num_blocks = -(-max_model_len(config) // BLOCK_TOKENS) + 1
    return num_blocks * BLOCK_TOKENS * cache_bytes_per_token(AutoConfig.from_pretrained(config.model.path), dtype)
