"""A tiny model of a config's family: the same layers, attention and head, with few weights and short limits.

What a family computes doesn't depend on its sizes. So a tiny model shows in a second, in float32 and on a CPU, whether
it can be scored, also beyond its window or its original positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from schemas.errors import ScoringError

LIMIT_TOKENS = 12  # of the longest limit of a tiny model: rows of more tokens are beyond all of them

_STD = 0.2  # of weights: log-probs are far from uniform, so that a wrong one shows
_MAX_LAYERS = 12
_HEADS, _HEAD_DIM, _HIDDEN = 4, 16, 64
# Sizes by their names in transformers; they fit each other.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "ngram_vocab_size_base"), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "word_embed_proj_dim"), _HIDDEN),
    **dict.fromkeys(("lru_width", "hidden_size_per_layer_input", "ple_embed_dim", "router_hidden_size"), _HIDDEN),
    **dict.fromkeys(("mamba_d_ssm", "attention_hidden_size"), 2 * _HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), _HEADS),
    **dict.fromkeys(("swa_num_attention_heads", "num_query_groups", "linear_num_value_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),  # of an encoder and a decoder
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads"), _HEADS),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 2 * _HEADS),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "kv_channels", "d_head", "d_rel"), _HEAD_DIM),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim", "v_head_dim", "qk_nope_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("indexer_head_dim",), _HEAD_DIM),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), _HEAD_DIM),
    **dict.fromkeys(("attention_head_dim",), 2 * _HEAD_DIM),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "laurel_rank", "adapter_rank", "gated_norm_rank"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "hc_lowrank"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "index_n_heads", "indexer_n_heads"), 4),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("qk_head_dim",), 8 + _HEAD_DIM),
}
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
# The most of a count.
_MOST: dict[str, int] = {
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "zero_expert_num"), 2),
    **dict.fromkeys(("moe_top_k", "kv_n_heads", "num_layers_per_stack"), 2),
    **dict.fromkeys(("n_group", "n_groups", "mamba_n_groups", "mamba_ngroups", "heads_per_ngram", "o_groups"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
}
# Of what a token sees, and where positions change.
_LIMITS: dict[str, int] = {
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), 6),
    **dict.fromkeys(("attention_chunk_size", "index_topk", "keep_window_size", "local_attention", "rel_extent"), 6),
    **dict.fromkeys(("original_max_position_embeddings", "floor_scale"), LIMIT_TOKENS),
    "indexer_budget": 8,  # of blocks of `indexer_compress_ratio`
}
_BLOCKS = {"index_block_size": 4, "index_topk_blocks": 2, "indexer_compress_ratio": 4}  # the first two are a limit
_CHUNKS = dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), 4)  # of a computation, which changes nothing
_WIDTHS = ("intermediate", "ffn", "dim_ff", "d_inner", "n_inner")  # in names of the widths of MLPs
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "eod_token_id", "sep_token_id", "decoder_start_token_id")


def shrink_config(config: PretrainedConfig, longest: int) -> PretrainedConfig:
    """Return the config of a tiny model of the same family.

    Args:
        config: The model's.
        longest: Tokens of the longest row: limits that it is within stay as they are.

    Raises:
        Exception: Of transformers' own checks, if the sizes of this family are not of the usual names.
    """
    text = config.get_text_config(decoder=True)
    values = _plain_values(text)
    total = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), 2)
    num_layers = _num_layers(values, total)
    values = {name: _smaller(name, value, total, num_layers, longest) for name, value in values.items()}
    if isinstance(overrides := values.get("per_layer_config"), dict):
        values["per_layer_config"] = {at: value for at, value in overrides.items() if int(at) < num_layers}
    if isinstance(layers := values.get("ple_layer_ids"), list):  # counted from 1
        values["ple_layer_ids"] = [at for at in layers if at <= num_layers]
    heads = next((text.to_dict()[name] for name in ("num_attention_heads", "n_head", "n_heads") if name in values), 0)
    for name in _KEY_HEADS:
        if isinstance(count := values.get(name), int):
            values[name] = 1 if count == 1 else _HEADS if count >= heads else _HEADS // 2
    if hasattr(text, "decoder_attention_heads"):  # of a decoder's config, transformers renames it
        values["decoder_attention_heads"] = _HEADS
    if "qk_rope_head_dim" in values and "head_dim" in values:
        values["head_dim"] = values["qk_rope_head_dim"]
    if "state_size" in values and "num_heads" in values:  # of a Mamba 2
        values["head_dim"] = 2 * _HIDDEN // _HEADS
    values["rope_parameters"] = _shorter_factors(values, values.get("rope_parameters"))
    values["initializer_range"] = _STD
    values.pop("dtype", None)
    return type(text).from_dict(values)


def build_miniature(config: PretrainedConfig, longest: int, seed: int = 0) -> PreTrainedModel:
    """Build a tiny model of a config's family, in float32 on the CPU, with random weights and without dropout.

    The global random state is unchanged.

    Args:
        config: The model's.
        longest: Tokens of the longest row; see `shrink_config`.
        seed: Of its weights.

    Raises:
        ScoringError: The family's code doesn't work with these sizes.
    """
    try:
        with torch.random.fork_rng(devices=()), torch.device("cpu"):
            torch.manual_seed(seed)
            small = shrink_config(config, longest)
            if type(small) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # its class is found by the config that it is a part of
                small = type(config)(text_config=small)  # type: ignore[call-arg]
            model: PreTrainedModel = AutoModelForCausalLM.from_config(small, dtype=torch.float32)  # type: ignore[no-untyped-call]
            for module in model.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, std=_STD)
    except Exception as error:  # of any type
        raise ScoringError(f"no tiny model of {config.model_type} can be built: {error}") from error
    model.train(False)
    return model.requires_grad_(False)


@contextmanager
def single_thread() -> Iterator[None]:
    """Compute on one thread: tiny products take longer when threads wait for each other, seconds on busy cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _plain_values(text: PretrainedConfig) -> dict[str, Any]:
    """Return a config's fields; of its parts, only fields of their own, as some classes of parts refuse the others."""
    values: dict[str, Any] = text.to_dict()
    common = PretrainedConfig().to_dict().keys() - {"model_type"}
    parts = {name: part for name in text.sub_configs if isinstance(part := values.get(name), dict)}
    return values | {name: {key: part[key] for key in part.keys() - common} for name, part in parts.items()}


def _num_layers(values: dict[str, Any], total: int) -> int:
    """Return how many of the first layers have each kind of layer among them, at least two."""
    of_layers = [value for value in values.values() if isinstance(value, list) and len(value) == total]
    kinds = [repr(kind) for kind in zip(*of_layers, strict=True)]
    num_layers = 1 + max(map(kinds.index, kinds), default=0)
    overrides = values.get("per_layer_config")
    if isinstance(overrides, dict) and overrides:
        num_layers = max(num_layers, 1 + min(map(int, overrides)))
    for name in ("attn_layer_period", "sliding_window_pattern", "no_rope_layer_interval"):
        num_layers = max(num_layers, values.get(name) or 0)
    sharing = [at for at, kind in enumerate(values.get("layers_block_type") or ()) if kind == "hybrid"]
    if len(sharing) > 1:  # of the same weights
        num_layers = max(num_layers, 1 + sharing[1])
    if values.get("num_kv_shared_layers"):
        num_layers *= 2
    return min(total, max(2, num_layers), _MAX_LAYERS)


def _shorter_factors(values: dict[str, Any], rope: Any) -> Any:
    """Return rotary parameters with as many factors as a tiny head has frequencies, from all of them."""
    if not isinstance(rope, dict) or "long_factor" not in rope:
        return rope
    count = int(values.get("head_dim") or _HEAD_DIM) * float(rope.get("partial_rotary_factor") or 1) // 2
    factors = {name: rope[name] for name in ("short_factor", "long_factor")}
    return rope | {
        name: [each[int(at * len(each) / count)] for at in range(int(count))] for name, each in factors.items()
    }


def _smaller(name: str, value: Any, total: int, num_layers: int, longest: int) -> Any:
    """Return a value of a config, made smaller."""
    if name in _LAYERS:
        return num_layers
    if name == "num_kv_shared_layers":
        return min(value or 0, num_layers // 2)
    if isinstance(value, list):
        return value[:num_layers] if len(value) == total else value
    if isinstance(value, dict):
        return {key: _smaller(key, part, total, num_layers, longest) for key, part in value.items()}
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name in _SIZES:
        return _SIZES[name]
    if name in _LIMITS:
        return min(value, _LIMITS[name]) if value < longest else value
    if name in _TOKENS:
        return min(value, 2)
    most = _MOST | _BLOCKS | _CHUNKS
    if any(part in name for part in _WIDTHS) and "layer" not in name and value:
        return 32
    return min(value, most.get(name, value))
