"""The start-up check that packed sequences are isolated and score as in the model's own forward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.scoring.attention import PACKED_ATTENTION
from rl_core.scoring.forward import pack_row
from rl_core.scoring.head import lm_head
from rl_core.scoring.logprobs import packed_logprobs
from schemas.errors import ScoringError

Sequences = Sequence[tuple[Tensor, Tensor]]  # prompt and response ids of each

_LENGTHS = ((3, 5), (1, 6), (4, 2))  # prompt and response tokens of the probe's sequences
_CHUNK_TOKENS = 8
_PADDED = 'set packing.kind = "padded" to train it with padding'
_HALF = (torch.bfloat16, torch.float16)
# Limits in nats. A changed row has the same shape as the original, so that kernels round in the same way and log-probs
# hardly move; a sequence alone has another shape, which half precision rounds differently, by up to some 0.1 nats.
_MAX_MOVEMENT, _MAX_DIFFERENCE = 1e-5, 1e-3
_MAX_MOVEMENT_HALF, _MAX_DIFFERENCE_HALF = 1e-3, 0.3


@torch.no_grad()
def leak_probe(model: PreTrainedModel) -> None:
    """Check that packed scoring is exact for a model.

    It packs three short random sequences. Changing one must not move the log-probs of the others, and the log-probs of
    each must equal those of the model's own forward of this sequence alone. The model and the global random state are
    unchanged. Limits are wider for half precision: probe in the run's compute dtype. A sharded model is probed
    within a forward of its root module, which gathers the weights outside of the layers.

    Args:
        model: A causal language model that uses packed attention.

    Raises:
        ScoringError: Log-probs moved with another sequence, or differ from those of the sequence alone. Don't train.
    """
    sequences, vocab_size = _random_sequences(model)
    is_half = lm_head(model).weight.dtype in _HALF
    try:
        packed = _score_packed(model, sequences)
    except (TypeError, NotImplementedError) as error:  # of the model's own code
        raise ScoringError(f"{type(model).__name__} can't run packed rows: {error}; {_PADDED}") from error
    for changed, (prompt, response) in enumerate(sequences):
        other = ((prompt + 1) % vocab_size, (response + 1) % vocab_size)
        moved = _score_packed(model, [*sequences[:changed], other, *sequences[changed + 1 :]])
        _check_isolation(packed, moved, changed, _MAX_MOVEMENT_HALF if is_half else _MAX_MOVEMENT)
    alone = _score_alone(model, sequences)
    _check_agreement(packed, alone, _MAX_DIFFERENCE_HALF if is_half else _MAX_DIFFERENCE)


def _random_sequences(model: PreTrainedModel) -> tuple[Sequences, int]:
    """Return the probe's sequences, which are always the same, and the vocabulary size."""
    vocab_size: int = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(vocab_size, (size,), generator=generator) for pair in _LENGTHS for size in pair]
    ids = [part.to(model.device) for part in ids]
    return list(zip(ids[::2], ids[1::2], strict=True)), vocab_size


def _score_packed(model: PreTrainedModel, sequences: Sequences) -> tuple[Tensor, ...]:
    """Compute the log-probs of each sequence's response, all packed into one row."""
    prompts, responses = zip(*sequences, strict=True)
    prompt_lengths, response_lengths = (torch.tensor([len(ids) for ids in parts]) for parts in (prompts, responses))
    row = pack_row(torch.cat(prompts), prompt_lengths, torch.cat(responses), response_lengths)
    logprobs = packed_logprobs(model, row, temperature=1.0, chunk_tokens=_CHUNK_TOKENS)
    return torch.split(logprobs, response_lengths.tolist())


def _score_alone(model: PreTrainedModel, sequences: Sequences) -> list[Tensor]:
    """Compute the log-probs of each sequence's response by the model's own forward, including its LM head."""
    logprobs = []
    with _own_attention(model):
        for prompt, response in sequences:
            input_ids = torch.cat([prompt, response])
            logits = model(input_ids=input_ids.unsqueeze(0), use_cache=False).logits[0, len(prompt) - 1 : -1]
            scores = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
            logprobs.append(scores.gather(-1, response[:, None]).squeeze(-1))
    return logprobs


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use transformers' eager attention for the duration."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(PACKED_ATTENTION)


def _check_isolation(packed: Sequence[Tensor], moved: Sequence[Tensor], changed: int, limit: float) -> None:
    for index, (before, after) in enumerate(zip(packed, moved, strict=True)):
        if index != changed and not (movement := _distance(before, after)) <= limit:
            raise ScoringError(
                f"packed sequences attend to each other: changing sequence {changed} moved log-probs of sequence"
                f" {index} by {movement:.3g} nats (limit {limit:g}); {_PADDED}"
            )


def _check_agreement(packed: Sequence[Tensor], alone: Sequence[Tensor], limit: float) -> None:
    for index, (ours, own) in enumerate(zip(packed, alone, strict=True)):
        if not (difference := _distance(ours, own)) <= limit:
            raise ScoringError(
                f"packed scoring of sequence {index} differs from the model's own forward by {difference:.3g} nats"
                f" (limit {limit:g}): packed scoring doesn't support its attention, positions or LM head; {_PADDED}"
            )


def _distance(first: Tensor, second: Tensor) -> float:
    """Return the largest absolute difference; NaN, which passes no limit, if either has one."""
    return float((first - second).abs().max())
