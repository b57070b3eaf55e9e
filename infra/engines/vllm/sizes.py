"""How long sequences may get under vLLM, and what they take in its KV cache."""

import torch
from transformers import AutoConfig

from infra.engines.cache import cache_bytes_per_token
from infra.models.load import max_positions
from schemas.config.run import RunConfig

BLOCK_TOKENS = 32  # of a block of the KV cache: whole blocks of a prompt are shared between its samples


def max_model_len(config: RunConfig) -> int:
    """The most tokens of a prompt and its response that a run can ask for, and its model can take."""
    response = max(config.rollout.max_response_tokens, config.eval.max_response_tokens or 0)
    return min(config.data.max_prompt_tokens + response, max_positions(config.model))


def cache_bytes_per_sequence(config: RunConfig, dtype: torch.dtype) -> int:
    """What the longest sequence of a run takes in the KV cache: whole blocks, and the one that vLLM keeps empty."""
    num_blocks = -(-max_model_len(config) // BLOCK_TOKENS) + 1
    return num_blocks * BLOCK_TOKENS * cache_bytes_per_token(AutoConfig.from_pretrained(config.model.path), dtype)
