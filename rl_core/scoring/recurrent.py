"""Layers with a recurrent state (gated delta nets): in a packed row, each sequence starts with an empty state."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_core.scoring.runs import map_runs

# What decoder layers call their recurrent token mixer (qwen3_next, qwen3_5 and its mixture of experts).
_MIXERS = ("linear_attn",)


def isolate_recurrent_layers(model: PreTrainedModel) -> None:
    """Let the recurrent layers of a model treat the sequences of a packed row one by one; without one, as before."""
    for module in model.modules():
        for name in _MIXERS:
            mixer = getattr(module, name, None)
            if isinstance(mixer, nn.Module) and not isinstance(mixer.forward, _PerSequence):
                mixer.forward = _PerSequence(mixer.forward)


class _PerSequence:
    """A recurrent layer's forward, run once per run of consecutive sequences of equal length.

    Args:
        forward: The layer's own: [N, L, hidden] to the same shape, with N independent sequences.
    """

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self._forward = forward

    def __call__(
        self,
        hidden_states: Tensor,
        *arguments: Any,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int = 0,
        **options: Any,
    ) -> Tensor:
        if cu_seqlens is None:
            return self._forward(hidden_states, *arguments, **options)
        mixed = map_runs(lambda part: self._forward(part, *arguments, **options), cu_seqlens, hidden_states[0])
        return mixed.unsqueeze(0)
