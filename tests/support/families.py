"""Tiny models of many families, with random weights, as Hugging Face folders."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from infra.models.tiny import make_tokenizer
from tests.support import packed

SIZES: dict[str, Any] = {**packed.SIZES, "vocab_size": 272, "bos_token_id": None, "eos_token_id": 1}  # of its tokenizer
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
GROUPED = {**ROUTED, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": WINDOWED,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "gpt_oss": {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 16},
    "deepseek_v3": {**LATENT, **GROUPED},
    "glm4_moe": GROUPED,
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "afmoe": {**EXPERTS, "num_dense_layers": 1, "num_shared_experts": 1, "layer_types": ["full_attention"] * 2},
    "hrm_text": {},
    "laguna": {**EXPERTS, "layer_types": ["full_attention"] * 2, "shared_expert_intermediate_size": 16},
    "phimoe": {"num_local_experts": 4},
    "jamba": {**MAMBA, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "nemotron_h": {
        "layer_types": ["mamba", "attention"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
    },
    "gemma3": {
        "text_config": {**SIZES, **WINDOWED},
        "vision_config": _IMAGES,
        "mm_tokens_per_image": 4,
        "image_token_index": 2,
    },
}


def make_family(folder: Path, name: str, *, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write a tiny model of a family, and return its folder.

    Its config has the dtype; its weights are stored in float32, so that whoever reads them rounds for himself. What
    the model's own class starts with zeros (routers' biases, sinks) is random, too.

    Args:
        folder: Where to write; made if it isn't there.
        name: One of `FAMILIES`, as in `model_type`.
        dtype: The config's dtype.
        seed: The seed of the weights.
    """
    model = build_family(name, seed)
    model.save_pretrained(folder)
    write_dtype(folder / "config.json", dtype)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def write_dtype(file: Path, dtype: str) -> None:
    """Write a dtype into a saved model's config, whose own is that of its weights."""
    config = json.loads(file.read_text())
    parts = [config, *(part for part in config.values() if isinstance(part, dict) and "dtype" in part)]
    for part in parts:
        part["dtype"] = dtype
    file.write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def build_family(name: str, seed: int = 0) -> PreTrainedModel:
    """Build a tiny model of a family in float32, in eval mode."""
    sizes = {} if "text_config" in FAMILIES[name] else SIZES
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(name, **{**sizes, **FAMILIES[name]})
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.ndim <= 1 and tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.1)
    return model.eval()
