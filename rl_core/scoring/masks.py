"""What a model's causal masks allow within a sequence, as a description in place of a tensor over the whole row."""

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor
from transformers import PretrainedConfig

from schemas.errors import ScoringError

# Arguments of transformers' mask functions (`sdpa_mask`) that change nothing about the mask of a packed row.
_SIZES = {"batch_size", "q_length", "kv_length", "q_offset", "kv_offset"}
_UNUSED = {"mask_function", "allow_is_causal_skip", "dtype", "device", *_SIZES}


@dataclass(frozen=True)
class PackedMask:
    """A causal mask.

    Attributes:
        sliding_window: A token sees itself and the window - 1 tokens before it; None: all tokens before it.
    """

    sliding_window: int | None

    def __getitem__(self, _: Any) -> NoReturn:
        """Refuse what sparse attentions do: to take a mask as a tensor, and hide more keys in it."""
        raise ScoringError(
            "its attention hides keys of its own choice in the mask, which packed attention doesn't build"
        )


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
    unknown = sorted(name for name, value in options.items() if value is not None and name not in _UNUSED)
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
