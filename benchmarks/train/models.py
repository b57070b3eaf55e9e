"""Models to measure: Qwen3 architecture with random weights, created directly on the device."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.utils import logging as transformers_logging

from schemas.errors import ConfigError

transformers_logging.set_verbosity_error()

# The first four are for CPUs. The others have the sizes of the published models with the same names.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "small": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "mid": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "wide-vocabulary": {
        "vocab_size": 151_936,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-1.7b": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-4b": {
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def size_of(name: str) -> dict[str, Any]:
    """Return the fields of `Qwen3Config` for one of `SIZES`.

    Raises:
        ConfigError: There is no such size.
    """
    return choose_size(name, SIZES)


def choose_size(name: str, sizes: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of one of `sizes`.

    Raises:
        ConfigError: There is no such size.
    """
    if name not in sizes:
        raise ConfigError(f"--models: {name!r} is not one of {', '.join(sizes)}")
    return sizes[name]


def make_model(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of one of `SIZES` with tied embeddings, in evaluation mode.

    Raises:
        ConfigError: There is no such size.
    """
    config = Qwen3Config(
        **size_of(name),
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
