"""A tiny model of a config's family: the same layers, attention and head, with few weights and short limits.

What a family computes doesn't depend on its sizes. So a tiny model shows in a second, in float32 and on a CPU, whether
it can be scored, also beyond its window or its original positions.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

LIMIT_TOKENS = 12  # of the longest limit of a tiny model: rows of more tokens are beyond all of them

_STD = 0.2  # of weights: log-probs are far from uniform, so that a wrong one shows
_HEAD_DIM = 16
_MAX_LAYERS = 12
# The most that a number of a config may be, by its names in transformers; sizes fit each other.
_MOST: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "ngram_vocab_size_base", "split_ngram_parts"), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "lru_width", "ple_embed_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "hidden_size_per_layer_input", "router_hidden_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads", "num_query_groups", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "kv_channels", "attention_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim", "d_rel"), _HEAD_DIM),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "index_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(
        ("v_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "qk_head_dim"), 16
    ),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "laurel_rank", "adapter_rank", "gated_norm_rank"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "hc_lowrank"), 8),
    **dict.fromkeys(("mamba_d_ssm", "attention_hidden_size"), 64),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "index_n_heads"), 4),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("zero_expert_num", "heads_per_ngram", "o_groups", "n_group", "n_groups", "mamba_n_groups"), 2),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "mamba_ngroups"), 1),
    # Limits of what a token sees, and where positions change.
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), 6),
    **dict.fromkeys(("attention_chunk_size", "index_topk", "keep_window_size", "local_attention"), 6),
    **dict.fromkeys(("index_block_size", "chunk_size", "mamba_chunk_size", "block_size", "rel_extent"), 4),
    **dict.fromkeys(("index_topk_blocks",), 2),
    **dict.fromkeys(("original_max_position_embeddings", "floor_scale"), LIMIT_TOKENS),
}
_WIDTHS = ("intermediate", "ffn", "dim_ff", "d_inner", "n_inner")  # in names of the widths of MLPs
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "eod_token_id", "sep_token_id")


def shrink_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of a tiny model of the same family, without a padding token.

    Raises:
        Exception: Of transformers' own checks, if the sizes of this family are not of the usual names.
    """
    text = config.get_text_config(decoder=True)
    values = text.to_dict()
    values.update(_shrunk(values, _num_layers(values)))
    values.update(initializer_range=_STD, **{name: None for name in _TOKENS if name in values})
    values.pop("dtype", None)
    return type(text).from_dict(values)


def build_miniature(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Build a tiny model of a config's family, in float32 on the CPU, with random weights and without dropout.

    The global random state is unchanged.

    Raises:
        Exception: Of any type: the family's code doesn't work with these sizes.
    """
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shrink_config(config), dtype=torch.float32)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_STD)
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model.eval().requires_grad_(False)


def _num_layers(values: dict[str, Any]) -> int:
    """Return how many of the first layers have each kind of layer among them, at least two."""
    total = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), 2)
    of_layers = [value for value in values.values() if isinstance(value, list) and len(value) == total]
    kinds = [repr(kind) for kind in zip(*of_layers, strict=True)]
    num_layers = 1 + max(map(kinds.index, kinds), default=0)
    for name in ("attn_layer_period", "sliding_window_pattern", "no_rope_layer_interval"):
        num_layers = max(num_layers, values.get(name) or 0)
    if values.get("num_kv_shared_layers"):
        num_layers *= 2
    return min(total, max(2, num_layers), _MAX_LAYERS)


def _shrunk(values: dict[str, Any], num_layers: int) -> dict[str, Any]:
    total = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), 2)
    return {name: _smaller(name, value, total, num_layers) for name, value in values.items()}


def _smaller(name: str, value: Any, total: int, num_layers: int) -> Any:
    """Return a value of a config, made smaller."""
    if name in _LAYERS:
        return num_layers
    if name == "num_kv_shared_layers":
        return min(value or 0, num_layers // 2)
    if isinstance(value, list):
        return value[:num_layers] if len(value) == total else value
    if isinstance(value, dict):
        return {key: _smaller(key, part, total, num_layers) for key, part in value.items()}
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name in _MOST:
        return min(value, _MOST[name])
    return min(value, 32) if any(part in name for part in _WIDTHS) and "layer" not in name else value
