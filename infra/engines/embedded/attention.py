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

from rl_core.scoring.attention import unknown_options
from schemas.errors import ScoringError

NAME = "sluice_decode"


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' SDPA does, grouped by key head if each row has one query: [N, Q, K * G, D], and None.

    Args:
        module: The attention layer.
        query: [N, K * G, Q, D].
        key: [N, K, T, D].
        value: [N, K, T, D].
        attention_mask: Boolean or additive [N or 1, 1, Q, T], or None.
        scaling: Factor of the scores; None: D ** -0.5.
        softcap: Scores become softcap * tanh(score / softcap); None: they stay.
        s_aux: [K * G] sinks, a further score of each head; None: none. (transformers' name)
        sliding_window: In the mask already.
        dropout: None is applied.
        position_bias: Added to the scores; None: nothing.
        **kwargs: Further options of the model; any that could change the result is refused.

    Raises:
        ScoringError: The layer needs an option that is not among these.
    """
    if unknown := unknown_options(kwargs):
        raise ScoringError(
            f"{type(module).__name__} needs {', '.join(unknown)}, which the embedded engine doesn't support"
        )
    if softcap is not None or s_aux is not None:
        assert position_bias is None, "no model has both"
        return _explicit(query, key, value, attention_mask, scaling, softcap, s_aux).transpose(1, 2), None
    num_rows, num_heads, num_queries, head_dim = query.shape
    shared_mask = attention_mask is None or attention_mask.shape[1] == 1
    if num_queries != 1 or not shared_mask or position_bias is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, position_bias=position_bias
        )
    if query.device.type == "cpu" and query.dtype == torch.float32:
        return _explicit(query, key, value, attention_mask, scaling).transpose(1, 2), None
    grouped = query.reshape(num_rows, key.shape[1], num_heads // key.shape[1], head_dim)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(num_rows, 1, num_heads, value.shape[-1]), None


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention by its definition, [N, K * G, Q, D]; for few queries, the CPU's kernel is slower by up to 3.

    Scores with a softcap or sinks are in float32.
    """
    (num_rows, num_heads, num_queries, _), num_keys = query.shape, key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # The queries of a group of heads are those of one head: [N, K, G * Q, D].
    grouped = (query * scale).reshape(num_rows, num_keys, -1, query.shape[-1])
    scores = (grouped @ key.transpose(-1, -2)).view(num_rows, num_heads, num_queries, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores.float() / softcap)
    if mask is None and num_queries > 1:
        mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(scores.shape[-1] - num_queries)
    if mask is not None:  # of a padding query, all keys are masked: it must not be NaN, so this is not -inf
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(num_rows, -1, num_queries, 1)
        scores = torch.cat([scores.float(), column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]].to(value.dtype)
    output = weights.view(num_rows, num_keys, -1, key.shape[2]) @ value
    return output.view(num_rows, num_heads, num_queries, -1)


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
