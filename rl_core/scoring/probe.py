"""The start-up checks that sequences are isolated and score as in the model's own forward, packed or padded."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.scoring.attention import use_packed_attention
from rl_core.scoring.comparison import (
    Kind,
    Sequences,
    random_sequences,
    score_alone,
    score_beginnings,
    score_branched,
    score_rows,
)
from rl_core.scoring.head import lm_head
from schemas.errors import ScoringError

_LENGTHS = ((3, 5), (1, 6), (4, 2))  # prompt and response tokens of the probe's sequences
_PADDED = 'set packing.kind = "padded" to train it with padding, which agrees'
_APART = "set packing.share_prompts = false to compute each sequence's prompt for itself"
_OTHER = "use another model"
_HALF = (torch.bfloat16, torch.float16)
# Limits in nats. A changed row has the same shape as the original, so that kernels round in the same way and log-probs
# hardly move; a sequence alone has another shape, which half precision rounds differently, by up to some 0.1 nats.
_MAX_MOVEMENT, _MAX_DIFFERENCE = 1e-5, 1e-3
# Of means: in half precision, a mixture of experts may compute a token with other experts, as it rounds differently.
_MAX_MOVEMENT_HALF, _MAX_DIFFERENCE_HALF = 0.05, 0.5


@torch.no_grad()
def leak_probe(model: PreTrainedModel, *, share_prompts: bool = False, branches: bool = False) -> None:
    """Check that packed scoring is exact for a model.

    It packs three short random sequences. Changing one must not move the log-probs of the others, and the log-probs of
    each must equal those of the model's own forward of this sequence alone. The model and the global random state are
    unchanged. Limits are wider for half precision: probe in the run's compute dtype. A sharded model is probed
    within a forward of its root module, which gathers the weights outside of the layers.

    Args:
        model: A causal language model that uses packed attention.
        share_prompts: Whether to check sequences that share a prompt, too.
        branches: Whether to check a sequence that branches, too.

    Raises:
        ScoringError: Log-probs moved with another sequence or with later tokens, or differ from those of the sequence
            alone. Don't train.
    """
    sequences = random_sequences(model, _LENGTHS)
    alone = score_alone(model, sequences)
    _check_causality(model, sequences, alone)
    try:
        packed = score_rows(model, sequences, "packed")
        _check_isolation(model, sequences, packed)
        _check_agreement(model, packed, alone, "packed")
    except ScoringError as error:
        try:
            _check_agreement(model, score_rows(model, sequences, "padded"), alone, "padded")
        except ScoringError as other:
            raise ScoringError(f"{error}; {other}; {_OTHER}") from error
        raise ScoringError(f"{error}; {_PADDED}") from error
    finally:
        use_packed_attention(model)
    if share_prompts:
        _check_shared(model, sequences)
    if branches:
        _check_branched(model, sequences)


@torch.no_grad()
def padded_probe(model: PreTrainedModel) -> None:
    """Check that a model is causal, and padded scoring equal to its own forward of each of three sequences alone.

    Args:
        model: A causal language model that uses padded attention; see `leak_probe`.

    Raises:
        ScoringError: Log-probs differ, or move with later tokens. Don't train.
    """
    sequences = random_sequences(model, _LENGTHS)
    alone = score_alone(model, sequences)
    _check_causality(model, sequences, alone)
    try:
        _check_agreement(model, score_rows(model, sequences, "padded"), alone, "padded")
    except ScoringError as error:
        raise ScoringError(f"{error}; {_OTHER}") from error


def _check_shared(model: PreTrainedModel, sequences: Sequences) -> None:
    """Give all sequences the first one's prompt, once in a row, and check that they score as alone, and isolated."""
    prompt = sequences[0][0]
    same = [(prompt, response) for _, response in sequences]
    try:
        alone = score_alone(model, same)
        shared = score_rows(model, same, "packed", share_prompts=True)
        _check_agreement(model, shared, alone, "packed")
        other = prompt, _other_tokens(model, same[1][1])
        _check_movement(model, 1, shared, score_rows(model, [same[0], other, *same[2:]], "packed", share_prompts=True))
    except ScoringError as error:
        raise ScoringError(f"with a shared prompt, {error}; {_APART}") from error
    finally:
        use_packed_attention(model)


def _check_branched(model: PreTrainedModel, sequences: Sequences) -> None:
    """Let a response branch, and check that both of its paths score as alone, and that the first is isolated."""
    try:
        branched, alone = score_branched(model, sequences)
        _check_agreement(model, branched, alone, "packed")
        other = sequences[0], (sequences[1][0], _other_tokens(model, sequences[1][1]))
        _check_movement(model, 1, branched, score_branched(model, other)[0])
    except ScoringError as error:
        raise ScoringError(f"with a branch of a trajectory, {error}; {_OTHER}") from error
    finally:
        use_packed_attention(model)


def _check_causality(model: PreTrainedModel, sequences: Sequences, alone: Sequence[Tensor]) -> None:
    """Change the second half of each response, and check that the log-probs of the first stay."""
    before, after = score_beginnings(model, sequences, alone)
    limit = _MAX_MOVEMENT_HALF if _is_half(model) else _MAX_DIFFERENCE  # chunks of recurrent layers round differently
    if not (movement := _distance(model, [before], [after])) <= limit:
        raise ScoringError(
            f"{type(model).__name__} isn't causal: changing later tokens moved log-probs of earlier ones by "
            f"{movement:.3g} nats (limit {limit:g}), but they don't exist while it samples; {_OTHER}"
        )


def _check_isolation(model: PreTrainedModel, sequences: Sequences, packed: Sequence[Tensor]) -> None:
    """Change each sequence in turn, and check that the log-probs of the others stay."""
    for changed, (prompt, response) in enumerate(sequences):
        other = _other_tokens(model, prompt), _other_tokens(model, response)
        moved = score_rows(model, [*sequences[:changed], other, *sequences[changed + 1 :]], "packed")
        _check_movement(model, changed, packed, moved)


def _check_movement(model: PreTrainedModel, changed: int, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Check that log-probs of sequences stay while one of them is changed."""
    kept = [index for index in range(len(before)) if index != changed]
    limit = _MAX_MOVEMENT_HALF if _is_half(model) else _MAX_MOVEMENT
    movement = _distance(model, [before[index] for index in kept], [after[index] for index in kept])
    if not movement <= limit:
        raise ScoringError(
            f"packed sequences attend to each other: changing sequence {changed} moved log-probs of the others by"
            f" {movement:.3g} nats (limit {limit:g})"
        )


def _other_tokens(model: PreTrainedModel, ids: Tensor) -> Tensor:
    vocab_size: int = model.config.get_text_config().vocab_size
    return (ids + 1) % vocab_size


def _check_agreement(model: PreTrainedModel, scored: Sequence[Tensor], alone: Sequence[Tensor], kind: Kind) -> None:
    limit = _MAX_DIFFERENCE_HALF if _is_half(model) else _MAX_DIFFERENCE
    if not (difference := _distance(model, scored, alone)) <= limit:
        raise ScoringError(
            f"{kind} scoring of {type(model).__name__} differs from its own forward by {difference:.3g} nats (limit"
            f" {limit:g}): its attention, positions or LM head are of a kind that {kind} scoring doesn't compute"
        )


def _is_half(model: PreTrainedModel) -> bool:
    return lm_head(model).weight.dtype in _HALF


def _distance(model: PreTrainedModel, first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the largest absolute difference, or of half precision the mean; NaN, which passes no limit, if any is."""
    distances = (torch.cat(list(first)) - torch.cat(list(second))).abs()
    return float(distances.mean() if _is_half(model) else distances.max())
