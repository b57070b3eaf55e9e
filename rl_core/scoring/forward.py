"""Packed rows of concatenated sequences, and the model's hidden states for them, packed or padded.

S sequences of n_p prompt and n_r response tokens, T = sum(n_p + n_r) tokens, R = sum(n_r) response tokens. C experts
are chosen for a token, in all layers together.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rl_core.scoring.attention import SharedKeys, require_packed_attention, require_padded_attention
from rl_core.scoring.positions import position_limit
from rl_core.scoring.recurrent import has_recurrent_layers
from rl_core.scoring.routing import ROUTED_EXPERTS
from schemas.errors import ScoringError

KEYS_PER_TOKEN = 8  # that are put together at once where sequences share prompts: less than a layer's own memory


@dataclass(frozen=True, eq=False)
class PackedRow:
    """The prompt and response of each sequence, concatenated without padding.

    Sequences may share a prompt: then it is there once, with the first of them, and the others consist of responses.
    A row without sequences (a dummy micro-batch) has a single filler token with boundaries around it, because models
    can't run without tokens; its hidden state is unused.
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in each sequence, or from the end of the prompt that it shares
    cu_seqlens: Tensor  # [S + 1] int32, boundaries from 0 to T; without sequences that have no tokens of their own
    predict_index: Tensor  # [R] int64, the position whose hidden state predicts the response token
    targets: Tensor  # [R] int64, the response tokens
    response_lengths: Tensor  # [S] int64
    max_seqlen: int  # tokens of the longest sequence, its prompt included
    experts: Tensor | None = None  # [T, C] integer, the experts to replay; None: the model chooses
    shared_keys: tuple[SharedKeys, ...] | None = None  # if sequences share prompts
    top_ids: Tensor | None = None  # [R, K] int64, further tokens to score at each target's position
    mask_counts: Tensor | None = None  # [R] int64, with sum M, the tokens that could be sampled there; 0: all
    mask_ids: Tensor | None = None  # [M] int64, these tokens

    @property
    def sampling_mask(self) -> tuple[Tensor, Tensor] | None:
        """The tokens over which targets are scored, as numbers [R] and ids [M]; None: all tokens."""
        return None if self.mask_counts is None or self.mask_ids is None else (self.mask_counts, self.mask_ids)

    def to(self, device: torch.device | str) -> "PackedRow":
        """Return the row with its tensors on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        if self.shared_keys is not None:
            moved["shared_keys"] = tuple(keys.to(device) for keys in self.shared_keys)
        return replace(self, **moved)


def pack_row(
    prompt_ids: Tensor,
    prompt_lengths: Tensor | NDArray[np.int64],
    response_ids: Tensor,
    response_lengths: Tensor | NDArray[np.int64],
    experts: tuple[Tensor, Tensor] | None = None,
    *,
    share_prompts: bool = False,
) -> PackedRow:
    """Pack sequences into one row.

    Args:
        prompt_ids: [sum(n_p)] integer, the concatenated prompts.
        prompt_lengths: [S] tokens, at least 1 each.
        response_ids: [R] integer, the concatenated responses.
        response_lengths: [S] tokens; 0 is allowed, and so is S = 0 (a dummy micro-batch).
        experts: [sum(n_p), C] and [R, C] integer, the experts of prompts and responses to replay, if any.
        share_prompts: Whether a prompt is in the row once for all sequences that have it (with the same experts), so
            that T is less than sum(n_p + n_r).

    Returns:
        The row, on the device of `prompt_ids`.

    Raises:
        ScoringError: A prompt is empty, so that nothing predicts the first token of the response.
        ValueError: The lengths don't add up to the number of ids, or the numbers of lengths differ.

    Example:
        >>> prompts, responses = torch.tensor([10, 11, 20]), torch.tensor([12, 21, 22])
        >>> row = pack_row(prompts, torch.tensor([2, 1]), responses, torch.tensor([1, 2]))
        >>> row.input_ids.tolist(), row.position_ids.tolist(), row.cu_seqlens.tolist()
        ([10, 11, 12, 20, 21, 22], [0, 1, 2, 0, 1, 2], [0, 3, 6])
        >>> row.predict_index.tolist(), row.targets.tolist()
        ([1, 3, 4], [12, 21, 22])
        >>> same, three = torch.tensor([10, 11, 10, 11]), torch.tensor([12, 21, 22])
        >>> row = pack_row(same, torch.tensor([2, 2]), three, torch.tensor([1, 2]), share_prompts=True)
        >>> row.input_ids.tolist(), row.position_ids.tolist(), row.cu_seqlens.tolist()
        ([10, 11, 12, 21, 22], [0, 1, 2, 2, 3], [0, 3, 5])
        >>> row.predict_index.tolist(), row.shared_keys[0].index.tolist(), row.shared_keys[0].cu_keys.tolist()
        ([1, 1, 3], [0, 1, 2, 0, 1, 3, 4], [0, 3, 7])
    """
    device = prompt_ids.device
    prompts, responses = _lengths(prompt_lengths, device), _lengths(response_lengths, device)
    _check_lengths(prompt_ids, prompts, response_ids, responses)
    if not len(prompts):
        return _filler_row(device)
    first = _first_with_prompt(prompt_ids, prompts, experts) if share_prompts else torch.arange(len(prompts))
    first = first.to(device)
    has_prompt = first == torch.arange(len(prompts), device=device)
    own = torch.where(has_prompt, prompts, 0) + responses
    starts = own.cumsum(0) - own
    response_starts = starts + own - responses
    prompt_index = _concatenate_ranges(starts[first], prompts)  # a shared one's tokens repeatedly
    response_index = _concatenate_ranges(response_starts, responses)
    input_ids = torch.empty(int(own.sum()), dtype=torch.int64, device=device)
    targets = response_ids.to(device=device, dtype=torch.int64)
    input_ids[prompt_index] = prompt_ids.to(torch.int64)
    input_ids[response_index] = targets
    predict_index = response_index - 1
    begins = (responses.cumsum(0) - responses)[responses > 0]
    predict_index[begins] = (starts[first] + prompts - 1)[responses > 0]
    return PackedRow(
        input_ids=input_ids,
        position_ids=_concatenate_ranges(prompts + responses - own, own),
        cu_seqlens=_boundaries(own[own > 0]),
        predict_index=predict_index,
        targets=targets,
        response_lengths=responses,
        max_seqlen=int((prompts + responses).max()),
        experts=_packed_experts(len(input_ids), (prompt_index, response_index), experts) if experts else None,
        shared_keys=None if has_prompt.all() else _shared_keys(starts[first], prompts, response_starts, responses, own),
    )


def _first_with_prompt(prompt_ids: Tensor, prompts: Tensor, experts: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return for each sequence the first one that has the same prompt: int64 [S]."""
    stops = prompts.cumsum(0).tolist()
    values = [part.cpu().numpy() for part in (prompt_ids, *(experts or ())[:1])]
    firsts: dict[tuple[bytes, ...], int] = {}
    return torch.tensor(
        [
            firsts.setdefault(tuple(part[start:stop].tobytes() for part in values), at)
            for at, (start, stop) in enumerate(pairwise([0, *stops]))
        ]
    )


def _shared_keys(
    prompt_starts: Tensor, prompts: Tensor, response_starts: Tensor, responses: Tensor, own: Tensor
) -> tuple[SharedKeys, ...]:
    """Return the keys of all sequences that have tokens of their own, from where their parts begin in the row."""
    present = own > 0
    starts, lengths = (
        torch.stack(parts, dim=1)[present] for parts in ((prompt_starts, response_starts), (prompts, responses))
    )
    own = own[present]
    at_once = _cut(lengths.sum(1), KEYS_PER_TOKEN * int(own.sum()))
    return tuple(
        SharedKeys(
            int(queries.sum()),
            _boundaries(queries),
            _concatenate_ranges(begins.flatten(), parts.flatten()),
            _boundaries(parts.sum(1)),
        )
        for queries, begins, parts in zip(*(torch.split(each, at_once) for each in (own, starts, lengths)), strict=True)
    )


def _cut(lengths: Tensor, most: int) -> list[int]:
    """Return how many consecutive sequences have at most so many tokens together, or are one; for all of them."""
    counts, total = [0], 0
    for length in lengths.tolist():
        if counts[-1] and total + length > most:
            counts.append(0)
            total = 0
        counts[-1] += 1
        total += length
    return counts


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
    """Run the model without its LM head on one packed row.

    Args:
        model: A causal language model that uses packed attention.
        row: The row, on the model's device.

    Returns:
        [T, hidden] hidden states after the final norm, in the model's dtype.

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
    """Return why packed sequences of a model can't share their prompts; None: they can.

    Args:
        config: The model's.
    """
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


def _packed_experts(num_tokens: int, indices: tuple[Tensor, Tensor], experts: tuple[Tensor, Tensor]) -> Tensor:
    packed = experts[0].new_empty(num_tokens, experts[0].shape[1])
    for index, part in zip(indices, experts, strict=True):
        packed[index] = part
    return packed


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


def _filler_row(device: torch.device) -> PackedRow:
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return PackedRow(
        input_ids=torch.zeros(1, dtype=torch.int64, device=device),
        position_ids=torch.zeros(1, dtype=torch.int64, device=device),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=device),
        predict_index=nothing,
        targets=nothing,
        response_lengths=nothing,
        max_seqlen=1,
    )


def _lengths(lengths: Tensor | NDArray[np.int64], device: torch.device) -> Tensor:
    if isinstance(lengths, Tensor):
        return lengths.to(device=device, dtype=torch.int64)
    return torch.tensor(lengths, dtype=torch.int64, device=device)


def _boundaries(lengths: Tensor) -> Tensor:
    """Return int32 boundaries of sequences, from 0 to the sum of their lengths."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def _concatenate_ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate the ranges [start, start + length) of all sequences."""
    shift = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum()), device=starts.device) + shift.repeat_interleave(lengths)


def _check_lengths(prompt_ids: Tensor, prompts: Tensor, response_ids: Tensor, responses: Tensor) -> None:
    if prompts.shape != responses.shape or prompts.ndim != 1:
        raise ValueError(
            "prompt_lengths and response_lengths must be 1-D of one length, not"
            f" {tuple(prompts.shape)} and {tuple(responses.shape)}"
        )
    for name, ids, lengths in (("prompt", prompt_ids, prompts), ("response", response_ids, responses)):
        if ids.shape != (int(lengths.sum()),):
            raise ValueError(
                f"{name}_ids has shape {tuple(ids.shape)}, but {name}_lengths add up to {int(lengths.sum())}"
            )
    if (prompts < 1).any():
        raise ScoringError(
            f"sequence {int(prompts.argmin())} of the packed row has no prompt token, so nothing predicts the"
            " first token of its response; give every prompt at least one token (a BOS token will do)"
        )
