"""Scores of the same sequences by packed rows, by padded batches, and by the model's own forward of each alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import DistError
from transformers import PreTrainedModel

from rl_core.scoring.attention import use_packed_attention, use_padded_attention
from rl_core.scoring.logprobs import packed_scores, padded_scores
from rl_core.scoring.packing import Branch, pack_row
from schemas.errors import ScoringError

Kind = Literal["packed", "padded"]
Sequences = Sequence[tuple[Tensor, Tensor]]  # prompt and response ids of each

_CHUNK_TOKENS = 8
_SCORES = {"packed": (use_packed_attention, packed_scores), "padded": (use_padded_attention, padded_scores)}


def random_sequences(model: PreTrainedModel, lengths: Sequence[tuple[int, int]]) -> Sequences:
    """Return sequences of these prompt and response lengths, always the same, on the model's device."""
    vocab_size: int = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(vocab_size, (size,), generator=generator) for pair in lengths for size in pair]
    ids = [part.to(model.device) for part in ids]
    return list(zip(ids[::2], ids[1::2], strict=True))


def score_rows(
    model: PreTrainedModel,
    sequences: Sequences,
    kind: Kind,
    *,
    share_prompts: bool = False,
    branches: Sequence[Branch] = (),
) -> list[Tensor]:
    """Compute the log-probs of each sequence's response, all in one row; switch the model to the kind's attention.

    Args:
        model: The model.
        sequences: Prompts and responses.
        kind: How the row is computed.
        share_prompts: Whether equal prompts are in a packed row once.
        branches: Those of the responses, of a packed row.

    Raises:
        ScoringError: Scoring doesn't support the model, or the model's own code fails in such rows.
    """
    use, score = _SCORES[kind]
    prompts, responses = zip(*sequences, strict=True)
    prompt_lengths, response_lengths = (torch.tensor([len(ids) for ids in parts]) for parts in (prompts, responses))
    ids = torch.cat(prompts), prompt_lengths, torch.cat(responses), response_lengths
    row = pack_row(*ids, share_prompts=share_prompts, branches=branches)
    with one_line_errors(model, f"{kind} rows"):
        use(model)
        logprobs = score(model, row, temperature=1.0, chunk_tokens=_CHUNK_TOKENS).logprobs
    return list(torch.split(logprobs, response_lengths.tolist()))


def score_branched(model: PreTrainedModel, sequences: Sequences) -> tuple[list[Tensor], list[Tensor]]:
    """Score the first sequence with a branch in its response, the second one's response, packed and each path alone.

    Its attention is eager afterwards.

    Args:
        model: The model.
        sequences: At least two, of which the first has a response of at least two tokens.

    Returns:
        The log-probs of the response and of its branch, packed; and the same from the model's own forward.

    Raises:
        ScoringError: Scoring doesn't support the model, or the model's own code fails.
    """
    (prompt, response), (_, other) = sequences[:2]
    branch = Branch(0, len(response), len(prompt) + 1)  # after the response's second token
    (packed,) = score_rows(model, [(prompt, torch.cat([response, other]))], "packed", branches=[branch])
    first, second = score_alone(model, [(prompt, response), (prompt, torch.cat([response[:2], other]))])
    return [packed[: len(response)], packed[len(response) :]], [first, second[2:]]


def score_alone(model: PreTrainedModel, sequences: Sequences) -> list[Tensor]:
    """Compute the log-probs of each sequence's response by the model's own eager forward, including its LM head.

    The model's attention is eager afterwards.

    Raises:
        ScoringError: The model's own code fails.
    """
    logprobs = []
    with one_line_errors(model, "a plain forward"):
        model.set_attn_implementation("eager")
        for prompt, response in sequences:
            input_ids = torch.cat([prompt, response])
            logits = model(input_ids=input_ids.unsqueeze(0), use_cache=False).logits[0, len(prompt) - 1 : -1]
            scores = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
            logprobs.append(scores.gather(-1, response[:, None]).squeeze(-1))
    return logprobs


def score_beginnings(model: PreTrainedModel, sequences: Sequences, alone: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute log-probs of the first half of each response, all [T], before and after its second half is changed.

    A causal model has the same. Its attention is eager afterwards.

    Args:
        model: The model.
        sequences: Prompts and responses.
        alone: Their log-probs, of `score_alone`.

    Raises:
        ScoringError: The model's own code fails.
    """
    vocab_size: int = model.config.get_text_config().vocab_size
    halves = [len(response) // 2 for _, response in sequences]
    changed = [
        (prompt, torch.cat([response[:half], (response[half:] + 1) % vocab_size]))
        for (prompt, response), half in zip(sequences, halves, strict=True)
    ]
    again = score_alone(model, changed)
    before, after = (
        torch.cat([scores[:half] for scores, half in zip(scored, halves, strict=True)]) for scored in (alone, again)
    )
    return before, after


@contextmanager
def one_line_errors(model: PreTrainedModel, what: str) -> Iterator[None]:
    """Turn what a model's own code raises into a `ScoringError` of one line; memory and collectives fail as they do."""
    try:
        yield
    except (ScoringError, torch.OutOfMemoryError, DistError):
        raise
    except Exception as error:  # of any type: models are not written for this use
        reason = f"{type(error).__name__}: {error}".strip().split("\n")[0]
        raise ScoringError(f"{type(model).__name__} can't run {what}: {reason}") from error
