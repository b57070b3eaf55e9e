"""Models to measure: Qwen3 architecture with random weights."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.utils import logging as transformers_logging

from benchmarks.command import choose

transformers_logging.set_verbosity_error()

_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
# The first five are for CPUs. The others have the sizes of the published models with the same names.
_SIZES = {
    "tiny": (1024, 128, 352, 4, 4, 2, 32),  # vLLM's CPU kernels need heads of 32 at least
    "small": (4096, 256, 704, 4, 4, 2, 64),
    "mid": (8192, 512, 1408, 7, 8, 4, 64),
    "6m": (12_288, 256, 704, 4, 4, 2, 64),
    "27m": (12_288, 512, 1408, 7, 8, 4, 64),
    "qwen3-0.6b": (151_936, 1024, 3072, 28, 16, 8, 128),
    "qwen3-1.7b": (151_936, 2048, 6144, 28, 16, 8, 128),
    "qwen3-4b": (151_936, 2560, 9728, 36, 32, 8, 128),
}


def size_of(name: str) -> dict[str, Any]:
    """Return the fields of `Qwen3Config` for a size.

    Raises:
        ConfigError: There is no such size.
    """
    choose("model", [name], _SIZES)
    return dict(zip(_FIELDS, _SIZES[name], strict=True))


def make_model(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of a size with tied embeddings, created on the device, in evaluation mode.

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
