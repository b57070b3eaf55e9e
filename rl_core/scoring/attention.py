"""Causal attention within explicit sequence boundaries, as an attention function for transformers.

H query heads, K key and value heads, T tokens of one packed row, D head size, S sequences. Work is sum(len^2) over the
sequences; no mask over the whole row is built. Where sequences share a prompt, its tokens are in the row once, with the
first of them: the queries of the others are their responses' tokens, and their keys those of the prompt as well. A
branch of a response is such a sequence, too: its keys are those of its path.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from rl_core.scoring.explicit import explicit_attention, visible_keys
from rl_core.scoring.per_sequence import isolate_recurrent_layers, map_runs, use_own_lengths
from schemas.errors import ScoringError

# Arguments of transformers' mask functions (`sdpa_mask`) that change nothing about the mask of a packed row.
_SIZES = {"batch_size", "q_length", "kv_length", "q_offset", "kv_offset"}
_UNUSED_OF_MASKS = {"mask_function", "allow_is_causal_skip", "dtype", "device", *_SIZES}
PACKED_ATTENTION = "sluice_packed"
# Options that layers pass along and that no attention function uses: positions are in the queries and keys by then.
_UNUSED = ("position_ids", "use_cache", "is_causal")
_FLASH_HEAD_SIZES = range(8, 257, 8)


@dataclass(frozen=True)
class PackedMask:
    """A causal mask."""

    sliding_window: int | None  # a token sees itself and the window - 1 tokens before it; None: all tokens before it

    def __getitem__(self, _: Any) -> NoReturn:
        """Refuse what sparse attentions do: to take a mask as a tensor, and hide more keys in it."""
        raise ScoringError(
            "its attention hides keys of its own choice in the mask, which packed attention doesn't build"
        )


@dataclass(frozen=True, eq=False)
class SharedKeys:
    """The keys of consecutive sequences of a row in which some share a prompt, put together at once."""

    num_queries: int  # the sequences' own tokens in the row, t
    cu_queries: Tensor  # [s + 1] int32 boundaries of these, from 0 to t
    index: Tensor  # [L] int64, the row's tokens that are keys, sequence by sequence: the prompt's, then the response's
    cu_keys: Tensor  # [s + 1] int32 boundaries of the sequences in `index`, from 0 to L

    def to(self, device: torch.device | str) -> "SharedKeys":
        """Return the keys with the tensors on `device`."""
        tensors = (each.to(device) for each in (self.cu_queries, self.index, self.cu_keys))
        return SharedKeys(self.num_queries, *tensors)


def describe_mask(
    *,
    config: PretrainedConfig,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> PackedMask:
    """Describe the mask that a model asks for; the interface is that of transformers' `sdpa_mask`.

    Args:
        config: The model's.
        attention_mask: bool [1, T] of tokens that are no padding; some models make it themselves.
        local_size: The size of a sliding window, or of a chunk.
        use_vmap: Whether the model's own code changes the causal mask.
        **options: Further arguments; any of an unknown meaning is refused.

    Raises:
        ScoringError: The mask is another one than causal with or without a sliding window.
    """
    unknown = sorted(name for name, value in options.items() if value is not None and name not in _UNUSED_OF_MASKS)
    if attention_mask is not None and not attention_mask.all():
        unknown.append("attention_mask")
    if use_vmap:
        unknown.append("mask_function")
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        unknown.append(f"local_size = {local_size}")
    if unknown:
        raise ScoringError(
            f"{config.model_type} asks for a mask that is not only causal or a sliding window: {', '.join(unknown)}"
        )
    return PackedMask(local_size)


def register() -> None:
    """Register `sluice_packed` with transformers, in this process.

    Its mask function builds no mask, but says which window a layer's mask has. Boundaries come from `cu_seqlens` alone,
    never from guesses based on position ids.
    """
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, describe_mask)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Register the attention function and switch a model to it; recurrent layers and positions respect boundaries, too.

    Raises:
        ScoringError: The model's class has a built-in attention that can't be switched.
    """
    if PACKED_ATTENTION not in AttentionInterface():  # type: ignore[no-untyped-call]
        register()
    model.set_attn_implementation(PACKED_ATTENTION)
    require_packed_attention(model)
    isolate_recurrent_layers(model)
    use_own_lengths(model)


def require_packed_attention(model: PreTrainedModel) -> None:
    """Check that a model uses packed attention, which respects the boundaries of a packed row.

    Raises:
        ScoringError: The model uses another attention implementation.
    """
    if (actual := model.config._attn_implementation) != PACKED_ATTENTION:
        raise ScoringError(
            f"{type(model).__name__} uses attention {actual!r} of its own, which lets packed sequences attend to each"
            f" other, not {PACKED_ATTENTION!r}"
        )


def use_padded_attention(model: PreTrainedModel) -> None:
    """Switch a model to transformers' SDPA attention, or to eager attention if SDPA is missing or drops a part."""
    has_softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    has_sinks = any(hasattr(module, "sinks") for module in model.modules())
    use_own_lengths(model)
    if not (has_softcap or has_sinks):
        with suppress(ValueError):  # transformers' refusal
            model.set_attn_implementation("sdpa")
            return
    model.set_attn_implementation("eager")


def require_padded_attention(model: PreTrainedModel) -> None:
    """Check that a model doesn't use packed attention, which takes packed rows only.

    Raises:
        ScoringError: The model uses packed attention.
    """
    if model.config._attn_implementation == PACKED_ATTENTION:
        raise ScoringError(f"{type(model).__name__} uses attention {PACKED_ATTENTION!r}, which ignores padding")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PackedMask | None,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    shared_keys: tuple[SharedKeys, ...] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence of one packed row: [1, T, H, D], and None for the attention weights.

    CUDA tensors that the flash kernel supports (half precision, head sizes up to 256 in multiples of 8) use torch's
    varlen attention; all others use SDPA, sequence by sequence. A softcap or sinks are computed explicitly.

    Args:
        module: The attention layer.
        query: [1, H, T, D].
        key: [1, K, T, D]; H is a multiple of K.
        value: [1, K, T, D].
        attention_mask: What the model's mask allows; None: the model has made none.
        cu_seqlens: [S + 1] int32 boundaries, from 0 to T; passed by the caller of the model.
        max_seqlen: Tokens of the longest sequence, its prompt included.
        shared_keys: The keys of all sequences, if some share a prompt; None: those within their boundaries.
        scaling: Factor of the attention scores; None: D ** -0.5.
        dropout: Must be 0: a log-prob must be a function of weights and tokens.
        sliding_window: A token attends to itself and the window - 1 tokens before it; None: to all tokens before it.
            Where there is a mask, its window counts: not all layers pass their own.
        softcap: Scores become softcap * tanh(score / softcap); None: they stay.
        s_aux: [H] sinks, a further score of each head; None: none. (transformers' name)
        **kwargs: Further options of the model; any that could change the result is refused.

    Raises:
        ScoringError: No boundaries, more than one row, a mask, dropout, or an unsupported kind of attention.
    """
    _check_request(module, query, attention_mask, cu_seqlens, dropout, kwargs)
    assert cu_seqlens is not None
    if attention_mask is not None:
        sliding_window = attention_mask.sliding_window
    options: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window}
    if softcap is not None or s_aux is not None:
        attend = partial(_by_runs, partial(explicit_attention, softcap=softcap, sinks=s_aux, **options))
    elif query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in _FLASH_HEAD_SIZES:
        attend = partial(_varlen_flash, max_seqlen=max_seqlen, **options)
    else:
        attend = partial(_sequence_sdpa, **options)
    if shared_keys is None:
        return attend(query, key, value, cu_seqlens, cu_seqlens), None
    # The keys of each sequence are put together again in the backward, or a shared prompt's would be kept repeatedly.
    attend_shared = partial(_attend_shared, attend)
    parts = torch.split(query, [keys.num_queries for keys in shared_keys], dim=2)
    outputs = [
        checkpoint(attend_shared, part, key, value, keys, use_reentrant=False)
        for part, keys in zip(parts, shared_keys, strict=True)
    ]
    return torch.cat(outputs, dim=1), None


def _attend_shared(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, keys: SharedKeys
) -> Tensor:
    own_key, own_value = (states.index_select(2, keys.index) for states in (key, value))
    return attend(query, own_key, own_value, keys.cu_queries, keys.cu_keys)


def _varlen_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    *,
    max_seqlen: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Run one kernel over all sequences: [1, H, T, D] in, [1, T, H, D] out."""
    # The kernel takes [T, H, D]. Its window counts only the tokens before the token itself; -1: all of them. With fewer
    # queries than keys, the last ones are each other's.
    output = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens,
        cu_keys,
        max_seqlen,
        max_seqlen,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output.unsqueeze(0)


def _sequence_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    *,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Run SDPA once per run of consecutive sequences of equal length: [1, H, T, D] in, [1, T, H, D] out."""
    if query.is_cuda and query.shape[1] != key.shape[1]:
        # On CUDA this is float32, for which SDPA's grouped heads use the slow kernel; on a CPU they are fast.
        num_repeats = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(num_repeats, dim=1) for states in (key, value))
    attend = partial(_causal_sdpa, scaling=scaling, sliding_window=sliding_window)
    return _by_runs(attend, query, key, value, cu_seqlens, cu_keys)


def _by_runs(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, cu_keys: Tensor
) -> Tensor:
    """Attend once per run of consecutive sequences of equal lengths: [1, H, T, D] in, [1, T, H, D] out."""

    def run(*states: Tensor) -> Tensor:
        return attend(*(part.transpose(1, 2) for part in states)).transpose(1, 2)

    boundaries = (cu_seqlens, cu_keys, cu_keys)
    packed = (states[0].transpose(0, 1) for states in (query, key, value))
    return map_runs(run, *zip(packed, boundaries, strict=True)).unsqueeze(0)


def _causal_sdpa(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None
) -> Tensor:
    num_tokens, num_keys = query.shape[2], key.shape[2]
    if num_tokens == num_keys and (sliding_window is None or num_tokens <= sliding_window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    visible = visible_keys(num_keys - num_tokens, num_keys, 0, sliding_window, query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=True)


def _check_request(
    module: nn.Module,
    query: Tensor,
    attention_mask: PackedMask | Tensor | None,
    cu_seqlens: Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> None:
    layer = type(module).__name__
    if cu_seqlens is None:
        raise ScoringError(f"{layer} got no cu_seqlens, the boundaries of a packed row: its model doesn't pass them on")
    if query.shape[0] != 1:
        raise ScoringError(f"{layer} got {query.shape[0]} rows; a packed forward has one row of all sequences")
    if not isinstance(attention_mask, PackedMask | None):
        raise ScoringError(f"{layer} makes an attention mask of its own, which packed attention doesn't apply")
    if dropout:
        raise ScoringError(f"{layer} has attention dropout {dropout}; set attention_dropout to 0 in the model's config")
    if unknown := unknown_options(options):
        raise ScoringError(f"{layer} needs {', '.join(unknown)}, which packed attention doesn't support")
    if options.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ScoringError(f"{layer} isn't causal; packed scoring supports causal language models only")


def unknown_options(options: Mapping[str, Any]) -> list[str]:
    """Return the names of a layer's options that an attention function would have to know."""
    return [name for name, value in options.items() if value is not None and value is not False and name not in _UNUSED]
