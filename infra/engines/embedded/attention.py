"""Attention of one new token per row, without copies of the cache.

With grouped-query attention, transformers' SDPA path copies all keys and values once per query head whenever it gets a
mask. With a single query position, the query heads of a group can take the place of query positions instead.
N rows, K key heads, G query heads per key head, Q queries, T cached tokens, D dims.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

NAME = "sluice_decode"


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' SDPA does, with query heads grouped by key head if each row has one query.

    Args:
        module: The attention layer.
        query: [N, K * G, Q, D].
        key: [N, K, T, D].
        value: [N, K, T, D].
        attention_mask: Boolean or additive [N or 1, 1, Q, T], or None.
        **kwargs: Further arguments from transformers: `scaling`, `dropout`, `is_causal`, ...

    Returns:
        [N, Q, K * G, D], and None in place of the attention weights.
    """
    num_rows, num_heads, num_queries, head_dim = query.shape
    shared_mask = attention_mask is None or attention_mask.shape[1] == 1
    if num_queries != 1 or not shared_mask or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    grouped = query.reshape(num_rows, key.shape[1], num_heads // key.shape[1], head_dim)
    attend = _explicit if query.device.type == "cpu" and query.dtype == torch.float32 else scaled_dot_product_attention
    output = attend(grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return output.reshape(num_rows, 1, num_heads, value.shape[-1]), None


def _explicit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, attn_mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Compute SDPA by its definition: for so few queries, the CPU's kernel takes up to three times as long."""
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores.masked_fill_(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.softmax(scores, dim=-1) @ value


def decode_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return the mask for transformers' SDPA path; see `sdpa_mask` for the arguments.

    The newest token sees all tokens before it, so its causal mask is the padding mask, [N, T] viewed as [N, 1, 1, T].
    """
    sees_all = q_length == 1 and q_offset == kv_length - 1 and kv_offset == 0
    if sees_all and mask_function is causal_mask_function and attention_mask is not None:
        return attention_mask[:, None, None]
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)


def use_decode_attention(model: PreTrainedModel) -> None:
    """Make `model` decode with `decode_attention` if it uses SDPA; leave other models unchanged."""
    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(NAME, decode_attention)
    AttentionMaskInterface.register(NAME, decode_mask)
    model.set_attn_implementation(NAME)
