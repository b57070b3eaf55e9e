"""The model's hidden states for packed rows, computed as such or as a padded batch."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rl_core.scoring.attention import require_packed_attention, require_padded_attention
from rl_core.scoring.packing import PackedRow
from rl_core.scoring.per_sequence import has_recurrent_layers, position_limit
from rl_core.scoring.routing import ROUTED_EXPERTS
from schemas.errors import ScoringError


def decoder(model: PreTrainedModel) -> nn.Module:
    """Return a causal language model without its LM head.

    Raises:
        ScoringError: It doesn't tell which part that is.
    """
    # Some are wrong about it: Llama 4 returns itself, and a decoder of ModernBERT a layer of its head.
    for part in (model.get_decoder(), model.base_model, getattr(model, "model", None)):  # type: ignore[no-untyped-call]
        if isinstance(part, PreTrainedModel) and part is not model:
            return part
    raise ScoringError(f"{type(model).__name__} has no part that computes hidden states without its LM head")


def packed_hidden_states(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """Run the model without its LM head on one packed row: [T, hidden] after the final norm, in the model's dtype.

    Args:
        model: A causal language model that uses packed attention.
        row: The row, on the model's device.

    Raises:
        ScoringError: The model uses another attention, or a sequence is longer than its positions.
    """
    require_packed_attention(model)
    _check_positions(model, row)
    if row.shared_keys is not None and (fault := share_fault(model.config)) is not None:
        raise ScoringError(f"sequences of {type(model).__name__} can't share prompts: {fault}")
    output = decoder(model)(
        input_ids=row.input_ids.unsqueeze(0),
        position_ids=row.position_ids.unsqueeze(0),
        use_cache=False,
        cu_seqlens=row.cu_seqlens,
        max_seqlen=row.max_seqlen,
        **({} if row.shared_keys is None else {"shared_keys": row.shared_keys}),
        **_routed(row.experts),
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def share_fault(config: PretrainedConfig) -> str | None:
    """Return why packed sequences of a model can't share their prompts; None: they can."""
    if position_limit(config) is not None:
        return "its positions depend on the length of each sequence (LongRoPE)"
    if has_recurrent_layers(config):
        return "its recurrent layers would need their state at the end of each prompt"
    return None


def padded_hidden_states(model: PreTrainedModel, row: PackedRow, width: int = 0) -> tuple[Tensor, Tensor]:
    """Run the model without its LM head on the same sequences, as a right-padded batch with a mask.

    Args:
        model: A causal language model that doesn't use packed attention.
        row: The row, on the model's device.
        width: Pad to at least this many tokens; 0 pads to the longest sequence.

    Returns:
        [S * L, hidden] hidden states after the final norm, in the model's dtype, with padded length L; and [T] int64,
        the index of each token of the row among them.

    Raises:
        ScoringError: The model uses packed attention, or a sequence is longer than its positions.
    """
    assert row.shared_keys is None, "padded sequences can't share prompts"
    require_padded_attention(model)
    _check_positions(model, row)
    lengths = row.cu_seqlens.diff()
    num_sequences, width = len(lengths), max(width, row.max_seqlen)
    sequence = torch.arange(num_sequences, device=lengths.device).repeat_interleave(lengths)
    index = sequence * width + row.position_ids
    input_ids = row.input_ids.new_zeros(num_sequences * width)
    input_ids[index] = row.input_ids
    columns = torch.arange(width, device=lengths.device)
    output = decoder(model)(
        input_ids=input_ids.view(num_sequences, width),
        attention_mask=(columns < lengths[:, None]).to(torch.int64),
        position_ids=torch.minimum(columns, lengths[:, None] - 1),  # padding makes no sequence longer
        use_cache=False,
        **_routed(None if row.experts is None else _padded_experts(row.experts, index, len(input_ids))),
    )
    hidden: Tensor = output.last_hidden_state.flatten(0, 1)
    return hidden, index


def _routed(experts: Tensor | None) -> dict[str, Any]:
    return {} if experts is None else {ROUTED_EXPERTS: experts}


def _padded_experts(experts: Tensor, index: Tensor, num_positions: int) -> Tensor:
    """Return the experts of all positions of a padded batch; padding has those of the first token."""
    padded = experts[:1].expand(num_positions, -1).clone()
    padded[index] = experts
    return padded


def _check_positions(model: PreTrainedModel, row: PackedRow) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and row.max_seqlen > limit:
        every = [row.cu_seqlens] if row.shared_keys is None else [keys.cu_keys for keys in row.shared_keys]
        lengths = torch.cat([boundaries.diff() for boundaries in every])
        raise ScoringError(
            f"sequence {int(lengths.argmax())} of the packed row has {row.max_seqlen} tokens, but"
            f" {type(model).__name__} has only {limit} positions (max_position_embeddings); limit prompts and responses"
            " to that many tokens, or use a model with more positions"
        )
