"""Whether a family can be scored packed or padded: a tiny model of it against its own forward, sequence by sequence."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rl_core.scoring.comparison import (
    Kind,
    Sequences,
    one_line_errors,
    random_sequences,
    score_alone,
    score_beginnings,
    score_branched,
    score_rows,
)
from rl_core.scoring.logprobs import head_logprobs
from rl_core.scoring.miniature import LIMIT_TOKENS, build_miniature, single_thread
from schemas.errors import ScoringError

# Prompt and response tokens: some sequences are beyond every limit of a tiny model, and others are not.
_LENGTHS = ((3, 5), (2 * LIMIT_TOKENS, LIMIT_TOKENS), (1, 4), (5, LIMIT_TOKENS))
MAX_DIFFERENCE = 2e-3  # of log-probs, relative to their standard deviation; float32's rounding is below 5e-4
_HEAD = "its logits are not only its LM head's of its last hidden states, with a scale and softcap known here"

_NOT_CAUSAL = "it isn't causal: log-probs depend on later tokens, which don't exist while it samples"


@dataclass(frozen=True)
class Structure:
    """What can't score a family, and why; None: it can."""

    packed: str | None  # packed rows
    padded: str | None  # right-padded batches
    shared: str | None  # packed rows in which sequences share a prompt


@single_thread()
def check_structure(config: PretrainedConfig, longest: int) -> Structure | None:
    """Score a tiny model of a config's family, packed and padded, and compare with its own eager forward.

    Args:
        config: The model's.
        longest: Tokens of the longest row that is to be scored: only limits below it count.

    Returns:
        What can't; None if no tiny model of the family runs, so that only the model itself can show it.
    """
    try:
        model = build_miniature(config, longest)
        sequences = random_sequences(model, _LENGTHS)
        alone = score_alone(model, sequences)
        before, after = score_beginnings(model, sequences, alone)
    except ScoringError:
        return None
    if not relative_difference(after, before) <= MAX_DIFFERENCE:
        return Structure(_NOT_CAUSAL, _NOT_CAUSAL, _NOT_CAUSAL)
    if (fault := _head_fault(model, sequences)) is not None:
        return Structure(fault, fault, fault)
    packed, padded = (_fault(model, sequences, alone, kind) for kind in ("packed", "padded"))
    return Structure(packed, padded, packed or _shared_fault(model, sequences))


def _head_fault(model: PreTrainedModel, sequences: Sequences) -> str | None:
    """Return why the LM head can't be computed apart from the rest of the model."""
    try:
        with one_line_errors(model, "its decoder alone"):
            ours, own = head_logprobs(model, torch.cat(sequences[0]))
    except ScoringError as error:
        return str(error)
    return None if relative_difference(ours, own) <= MAX_DIFFERENCE else _HEAD


def _fault(model: PreTrainedModel, sequences: Sequences, alone: list[torch.Tensor], kind: Kind) -> str | None:
    try:
        scored = score_rows(model, sequences, kind)
    except ScoringError as error:
        return str(error)
    if relative_difference(torch.cat(scored), torch.cat(alone)) <= MAX_DIFFERENCE:
        return None
    return "log-probs of a tiny model of this family differ from those of its own forward"


def _shared_fault(model: PreTrainedModel, sequences: Sequences) -> str | None:
    """Return why sequences can't share prompts: two of them have each prompt, and score as if they didn't share it."""
    twice = [(prompt, response) for prompt, _ in sequences for _, response in sequences[:2]]
    try:
        shared, apart = (score_rows(model, twice, "packed", share_prompts=share) for share in (True, False))
        branched, alone = score_branched(model, sequences)
    except ScoringError as error:
        return str(error)
    if relative_difference(torch.cat(shared), torch.cat(apart)) > MAX_DIFFERENCE:
        return "log-probs of a tiny model of this family depend on it"
    if relative_difference(torch.cat(branched), torch.cat(alone)) > MAX_DIFFERENCE:
        return "log-probs of a tiny model of this family depend on branches in a row"
    return None


def relative_difference(ours: torch.Tensor, own: torch.Tensor) -> float:
    """Return the largest difference of log-probs, relative to their spread; NaN, which passes no limit, if any is."""
    return float((ours - own).abs().max() / own.std())
