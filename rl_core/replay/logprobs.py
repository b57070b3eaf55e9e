"""Log-probs of the response tokens of a packed row, without ever keeping logits.

T tokens, R response tokens, V vocabulary entries, C tokens per chunk. Only the R predicting positions pass
through the LM head, C at a time; a chunk's [C, V] logits are computed again in the backward.
"""

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rl_core.replay.forward import PackedRow, packed_hidden_states
from schemas.errors import ReplayError


@overload
def packed_logprobs(
    model: PreTrainedModel,
    row: PackedRow,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: Literal[False] = False,
) -> Tensor: ...


@overload
def packed_logprobs(
    model: PreTrainedModel,
    row: PackedRow,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def packed_logprobs(
    model: PreTrainedModel,
    row: PackedRow,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-prob of every response token under the model at a temperature.

    Args:
        model: A causal language model that uses packed attention.
        row: The packed row, on the model's device. Without response tokens the result is empty but still has
            a graph, so that its backward takes part in collectives and gives zero gradients.
        temperature: Positive; the logits are divided by it, as the sampler does.
        chunk_tokens: C, how many tokens' logits exist at once.
        with_entropy: Also return the entropy of each predicting distribution.

    Returns:
        [R] float32 in nats (float64 for a float64 model), in the order of the row's `targets`; with entropy,
        the pair of log-probs and entropies, alike in shape and unit.

    Raises:
        ReplayError: The model's attention or LM head isn't supported.
        ValueError: `temperature` or `chunk_tokens` isn't positive.
    """
    if temperature <= 0 or chunk_tokens < 1:
        raise ValueError(f"temperature {temperature} must be positive and chunk_tokens {chunk_tokens} at least 1")
    head = _lm_head(model)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    hidden = packed_hidden_states(model, row)[row.predict_index]
    parts = []
    for states, targets in zip(torch.split(hidden, chunk_tokens), torch.split(row.targets, chunk_tokens), strict=True):
        arguments = (states, targets, head.weight, head.bias, temperature, softcap, with_entropy)
        if torch.is_grad_enabled():
            parts.append(checkpoint(_score_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_score_chunk(*arguments))
    logprobs = torch.cat([part[0] for part in parts])
    return (logprobs, torch.cat([part[1] for part in parts])) if with_entropy else logprobs


def _score_chunk(
    states: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    with_entropy: bool,
) -> tuple[Tensor, ...]:
    """Log-probs, and entropies if asked for, of [C] targets from [C, hidden] states, in at least float32."""
    dtype = torch.promote_types(states.dtype, torch.float32)
    logits = F.linear(states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    normalizer = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normalizer
    if not with_entropy:
        return (logprobs,)
    mean_logit = (torch.softmax(logits, dim=-1) * logits).sum(-1)
    return logprobs, normalizer - mean_logit


def _lm_head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear):
        raise ReplayError(
            f"{type(model).__name__} has a {type(head).__name__} as LM head; packed replay needs an nn.Linear"
        )
    return head
