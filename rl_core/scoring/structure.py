"""Whether a family can be scored packed or padded: a tiny model of it against its own forward, sequence by sequence."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rl_core.scoring.comparison import Kind, Sequences, difference, random_sequences, score_alone, score_rows
from rl_core.scoring.miniature import LIMIT_TOKENS, build_miniature
from schemas.errors import ScoringError

# Prompt and response tokens: some sequences are beyond every limit of a tiny model, and others are not.
_LENGTHS = ((3, 5), (2 * LIMIT_TOKENS, LIMIT_TOKENS), (1, 4), (5, LIMIT_TOKENS))
_MAX_DIFFERENCE = 1e-3  # nats, in float32


@dataclass(frozen=True)
class Structure:
    """What can't score a family, and why; None: it can.

    Attributes:
        packed: Packed rows.
        padded: Right-padded batches.
    """

    packed: str | None
    padded: str | None


def check_structure(config: PretrainedConfig) -> Structure | None:
    """Score a tiny model of a config's family, packed and padded, and compare with its own eager forward.

    Returns:
        What can't; None if no tiny model of the family runs, so that only the model itself can show it.
    """
    try:
        model = build_miniature(config)
        sequences = random_sequences(model, _LENGTHS)
        alone = score_alone(model, sequences)
    except Exception:  # whatever the family's own code raises at sizes that it wasn't made for
        return None
    return Structure(*(_fault(model, sequences, alone, kind) for kind in ("packed", "padded")))


def _fault(model: PreTrainedModel, sequences: Sequences, alone: list[torch.Tensor], kind: Kind) -> str | None:
    try:
        scored = score_rows(model, sequences, kind)
    except ScoringError as error:
        return str(error)
    largest = max(difference(ours, own) for ours, own in zip(scored, alone, strict=True))
    if largest <= _MAX_DIFFERENCE:  # NaN is not
        return None
    return f"log-probs of a tiny model of this family differ by {largest:.2g} nats from those of its own forward"
