"""Activation memory of a model's decoder, found by running it on the meta device, where tensors have no memory.

T tokens of one packed row, or of a padded batch. What autograd saves for the backward pass is counted as it is saved,
so that every architecture, dtype and frozen layers are counted as they are. The LM head is `rl_core.planning.memory`'s.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rl_core.scoring import pack_row, use_packed_attention, use_padded_attention
from rl_core.scoring.comparison import Kind, one_line_errors
from rl_core.scoring.forward import decoder, packed_hidden_states
from rl_core.scoring.packing import PackedRow
from rl_core.training.sharding import layer_modules
from schemas.errors import ModelError, ScoringError


@dataclass(frozen=True)
class Activations:
    """Bytes that a forward of T tokens saves for its backward, beyond the weights themselves."""

    layers: tuple[int, ...]  # of each decoder layer
    layer_input: int  # the hidden states between two layers; with gradient checkpointing, all that a layer saves
    other: int  # outside the layers: embeddings, final norm, rotary positions
    widest: int  # the largest tensor that a layer saves


def trace_activations(model: PreTrainedModel, num_tokens: int, *, longest: int, kind: Kind = "packed") -> Activations:
    """Count what a forward saves for its backward.

    Args:
        model: On the meta device, in the compute dtype, with the parameters that train; its attention is switched to
            the kind's.
        num_tokens: T, padding included.
        longest: Tokens of the longest sequence; packed rows consist of sequences of this length.
        kind: Whether the row is packed, or a padded batch, for which a model may have an attention of its own.

    Raises:
        ModelError: The model can't run without values, e.g. because it routes tokens by them, or can't be packed.
    """
    try:
        with one_line_errors(model, "on the meta device"):
            saved = _Saved(model)
            with saved.recording(), _Abstract():
                hidden = (_padded_states if kind == "padded" else _packed_states)(model, num_tokens, longest)
    except ScoringError as error:
        raise ModelError(str(error)) from error
    return Activations(
        layers=tuple(saved.num_bytes[index] for index in range(len(saved.layers))),
        layer_input=hidden.nbytes,
        other=saved.num_bytes[None],
        widest=saved.widest,
    )


@dataclass
class _Saved:
    """Collects the storages that autograd saves, each counted once, for the layer that saved it first."""

    model: PreTrainedModel
    num_bytes: dict[int | None, int] = field(default_factory=dict)
    widest: int = 0

    def __post_init__(self) -> None:
        self.layers = layer_modules(self.model)
        self.num_bytes = dict.fromkeys([*range(len(self.layers)), None], 0)
        self._layer: int | None = None
        # A storage's Python object stays the same while it is referenced, so that its id names it.
        owned = [part.untyped_storage() for part in (*self.model.parameters(), *self.model.buffers())]
        self._seen = {id(storage): storage for storage in owned}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count during the block."""
        hooks = []
        for index, layer in enumerate(self.layers):
            hooks.append(layer.register_forward_pre_hook(self._enter(index)))
            hooks.append(layer.register_forward_hook(self._leave))
        try:
            with saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, index: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._layer = index

        return enter

    def _leave(self, *_: Any) -> None:
        self._layer = None

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self._seen:
            self._seen[id(storage)] = storage
            self.num_bytes[self._layer] += storage.nbytes()
            if self._layer is not None:
                self.widest = max(self.widest, storage.nbytes())
        return tensor


class _Abstract(TorchFunctionMode):
    """Attention as a fused kernel saves it, experts' products, and conditions: the meta device has none of them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _FusedAttention.apply(*args[:3])  # type: ignore[no-untyped-call]
        if func is Tensor.__bool__ and args[0].is_meta:  # asked for shortcuts, such as of a mask that hides nothing
            return True
        if getattr(func, "__name__", "") == "_grouped_mm":  # of experts, in float32: it has no such meta kernel
            return _GroupedMatmul.apply(*args[:2])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _FusedAttention(torch.autograd.Function):
    """Saves what flash attention does: its inputs, its output and a float32 per head and token."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        normalizers = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, normalizers)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("only forwards are traced")


class _GroupedMatmul(torch.autograd.Function):
    """Saves both factors: tokens [n, H], sorted by expert, and the experts' matrices [E, H, I]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, matrices)
        return tokens.new_empty(len(tokens), matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("only forwards are traced")


def _packed_states(model: PreTrainedModel, num_tokens: int, longest: int) -> Tensor:
    """Run a packed row of T tokens without values: [T, hidden]."""
    use_packed_attention(model)
    return packed_hidden_states(model, _meta_row(num_tokens, longest))


def _padded_states(model: PreTrainedModel, num_tokens: int, longest: int) -> Tensor:
    """Run a padded batch of about T tokens without values, as `padded_hidden_states` runs one: [S, L, hidden]."""
    use_padded_attention(model)
    num_sequences = -(-num_tokens // longest)
    ids = torch.zeros(num_sequences, -(-num_tokens // num_sequences), dtype=torch.int64, device="meta")
    output = decoder(model)(
        input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=torch.zeros_like(ids), use_cache=False
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def _meta_row(num_tokens: int, longest: int) -> PackedRow:
    """Return sequences of `longest` tokens and the rest, each of one prompt token; boundaries have values."""
    count, rest = divmod(num_tokens, longest)
    lengths = torch.tensor([longest] * count + [rest] * bool(rest))
    prompts, responses = torch.ones_like(lengths), lengths - 1
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    row = pack_row(ids[: len(lengths)], prompts, ids[len(lengths) :], responses)
    return PackedRow(
        input_ids=row.input_ids.to("meta"),
        position_ids=row.position_ids.to("meta"),
        cu_seqlens=row.cu_seqlens,
        predict_index=row.predict_index,
        targets=row.targets,
        response_lengths=row.response_lengths,
        max_seqlen=row.max_seqlen,
    )
