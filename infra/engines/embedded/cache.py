"""A KV cache that grows without copying itself at every token, and from which rows can be removed.

transformers' `DynamicLayer` concatenates, which copies all keys and values at every decoded token; on a CPU that is
most of a small model's decoding time. `PreallocatedLayer` writes into preallocated buffers.
"""

from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

_GROWTH_TOKENS = 64  # a full buffer grows by this much


class PreallocatedLayer(DynamicLayer):
    """A full-attention layer whose `keys` and `values` [N, heads, T, dim] are views of larger buffers."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens, and return all keys and values; see `DynamicLayer.update`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._key_buffer = key_states[:, :, :0]
            self._value_buffer = value_states[:, :, :0]
            self.keys, self.values = self._key_buffer, self._value_buffer
        assert self.keys is not None
        assert self.values is not None
        start = self.keys.shape[-2]
        stop = start + key_states.shape[-2]
        if stop > self._key_buffer.shape[-2]:
            self._key_buffer = _grown(self.keys, stop + _GROWTH_TOKENS)
            self._value_buffer = _grown(self.values, stop + _GROWTH_TOKENS)
        self._key_buffer[:, :, start:stop] = key_states
        self._value_buffer[:, :, start:stop] = value_states
        self.keys, self.values = self._key_buffer[:, :, :stop], self._value_buffer[:, :, :stop]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the rows at these indices, in this order; an index may repeat. See `Cache.reorder_cache`."""
        length = self.get_seq_length()
        self._key_buffer = self._key_buffer[beam_idx]
        self._value_buffer = self._value_buffer[beam_idx]
        self.keys, self.values = self._key_buffer[:, :, :length], self._value_buffer[:, :, :length]

    def take(self, row: int, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of a row's keys and values [heads, C, dim] at C columns, given by int64 or boolean indices."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[row][:, columns], self.values[row][:, columns]

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold these states [N, heads, T, dim] in place of any others."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._key_buffer, self._value_buffer = keys, values
        self.keys, self.values = keys, values


def _grown(states: torch.Tensor, num_tokens: int) -> torch.Tensor:
    buffer = states.new_empty((*states.shape[:2], num_tokens, states.shape[-1]))
    buffer[:, :, : states.shape[-2]] = states
    return buffer


def decoding_cache(config: PretrainedConfig) -> DynamicCache:
    """Return an empty cache for a model of `config`; layers other than full attention stay transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the model's argument that takes its cache; some recurrent families have their own."""
    return "cache_params" if "cache_params" in signature(model.forward).parameters else "past_key_values"


def can_move_rows(cache: DynamicCache) -> bool:
    """Return whether rows can be moved from one cache to another: all layers are `PreallocatedLayer`s."""
    return all(isinstance(layer, PreallocatedLayer) for layer in cache.layers)


def cache_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the cache bytes of one token of one row for a model of `config`, as if all layers were full attention."""
    return (
        sum(2 * _key_width(layer) for layer in config.get_text_config(decoder=True).per_layer_config) * dtype.itemsize
    )


def _key_width(layer: PretrainedConfig) -> int:
    """Return the width of a layer's keys, of all heads together; 0 in a family without attention."""
    heads = getattr(layer, "num_attention_heads", None)
    if not heads:
        return 0
    head_dim: int = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return (getattr(layer, "num_key_value_heads", None) or heads) * head_dim
