"""Scores of whole sequences: those of a sequence-classification model with one label, of packed rows.

S sequences, H hidden size.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_core.scoring.attention import use_packed_attention, use_padded_attention
from rl_core.scoring.comparison import one_line_errors
from rl_core.scoring.forward import packed_hidden_states
from rl_core.scoring.packing import PackedRow, pack_row
from schemas.errors import ScoringError

_LENGTHS = (7, 3, 12)  # tokens of the probe's sequences
_MAX_DIFFERENCE, _MAX_DIFFERENCE_HALF = 1e-4, 0.1  # of scores, relative to the larger of theirs and 1


def score_head(model: PreTrainedModel) -> nn.Linear:
    """Return the layer that makes a score of the last hidden state.

    Raises:
        ScoringError: It isn't a linear layer named `score`, as decoder-only models have.
    """
    if not isinstance(head := getattr(model, "score", None), nn.Linear):
        raise ScoringError(
            f"{type(model).__name__} has no linear layer `score`, which makes its score of the last token's hidden "
            "state; use a decoder-only model for sequence classification"
        )
    return head


def pack_whole(sequences: list[list[int]], device: torch.device) -> PackedRow:
    """Pack S sequences of token ids, at least 1 each, into one row."""
    ids = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64, device=device)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return pack_row(ids, lengths, ids[:0], torch.zeros_like(lengths))


@torch.inference_mode()
def packed_pooled_scores(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """Compute the score of each sequence of a packed row from its last token's hidden state: [S] float32.

    Args:
        model: A sequence-classification model with one label that uses packed attention.
        row: The row, on the model's device.

    Raises:
        ScoringError: The model uses another attention or head, or a sequence is longer than its positions.
    """
    head = score_head(model)
    states = packed_hidden_states(model, row)[row.cu_seqlens[1:].long() - 1].float()
    bias = None if head.bias is None else head.bias.float()
    return nn.functional.linear(states, head.weight.float(), bias)[:, 0]


@torch.inference_mode()
def prepare_pooled(model: PreTrainedModel) -> None:
    """Switch a model to packed attention, and check that each sequence then has the score of its own forward, alone.

    Raises:
        ScoringError: Scores differ, or the model can't run packed rows.
    """
    score_head(model)
    sequences = _random_sequences(model)
    use_padded_attention(model)
    alone = torch.cat([_score_alone(model, sequence) for sequence in sequences])
    with one_line_errors(model, "packed rows"):
        use_packed_attention(model)
        packed = packed_pooled_scores(model, pack_whole(sequences, model.device))
    limit = _MAX_DIFFERENCE if model.dtype == torch.float32 else _MAX_DIFFERENCE_HALF
    difference = float(((packed - alone).abs() / alone.abs().clamp(min=1)).max())
    if not difference <= limit:  # NaN passes no limit
        raise ScoringError(
            f"packed scores of {type(model).__name__} differ from those of its own forward by {difference:.3g} (limit "
            f"{limit:g}): its attention, positions or head can't be packed; use another reward model"
        )


def _score_alone(model: PreTrainedModel, sequence: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([sequence], device=model.device), use_cache=False).logits
    return logits[0].float()


def _random_sequences(model: PreTrainedModel) -> list[list[int]]:
    """Return the probe's sequences, which are always the same; none ends with the padding token."""
    config, generator = model.config.get_text_config(), torch.Generator().manual_seed(0)
    sequences = [torch.randint(config.vocab_size, (size,), generator=generator).tolist() for size in _LENGTHS]
    last = 0 if config.pad_token_id != 0 else 1
    return [[*sequence[:-1], last] if sequence[-1] == config.pad_token_id else sequence for sequence in sequences]
