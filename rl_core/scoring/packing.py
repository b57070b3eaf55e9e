"""Packed rows: sequences of prompts and responses, concatenated without padding.

S sequences of n_p prompt and n_r response tokens, T = sum(n_p + n_r) tokens, R = sum(n_r) response tokens. C experts
are chosen for a token, in all layers together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_core.scoring.attention import SharedKeys
from schemas.errors import ScoringError

KEYS_PER_TOKEN = 8  # that are put together at once where sequences share prompts: less than a layer's own memory


@dataclass(frozen=True, eq=False)
class PackedRow:
    """The prompt and response of each sequence, concatenated without padding.

    Sequences may share a prompt: then it is there once, with the first of them, and the others consist of responses.
    A response may branch: then its parts are sequences of their own, whose earlier tokens are those of the part that
    they go on from.
    A row without sequences (a dummy micro-batch) has a single filler token with boundaries around it, because models
    can't run without tokens; its hidden state is unused.
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in each sequence, or from the end of the tokens that it shares
    cu_seqlens: Tensor  # [S + 1] int32, boundaries from 0 to T; without sequences that have no tokens of their own
    predict_index: Tensor  # [R] int64, the position whose hidden state predicts the response token
    targets: Tensor  # [R] int64, the response tokens
    response_lengths: Tensor  # [S] int64
    max_seqlen: int  # tokens of the longest sequence, its prompt included
    experts: Tensor | None = None  # [T, C] integer, the experts to replay; None: the model chooses
    shared_keys: tuple[SharedKeys, ...] | None = None  # if sequences share prompts, or responses branch
    top_ids: Tensor | None = None  # [R, K] int64, further tokens to score at each target's position
    mask_counts: Tensor | None = None  # [R] int64, with sum M, the tokens that could be sampled there; 0: all
    mask_ids: Tensor | None = None  # [M] int64, these tokens

    @property
    def sampling_mask(self) -> tuple[Tensor, Tensor] | None:
        """The tokens over which targets are scored, as numbers [R] and ids [M]; None: all tokens."""
        return None if self.mask_counts is None or self.mask_ids is None else (self.mask_counts, self.mask_ids)

    def score_only(self, positions: Tensor) -> "PackedRow":
        """Return the row with some of its R targets only, of which the LM head then computes no others.

        Args:
            positions: [R] bool, on the row's device.
        """
        sequence = torch.arange(len(self.response_lengths), device=positions.device)
        of_each = sequence.repeat_interleave(self.response_lengths)[positions]
        selected: dict[str, Any] = {
            name: value[positions]
            for name in ("predict_index", "targets", "top_ids", "mask_counts")
            if (value := getattr(self, name)) is not None
        }
        if self.mask_ids is not None and self.mask_counts is not None:
            selected["mask_ids"] = self.mask_ids[positions.repeat_interleave(self.mask_counts)]
        lengths = torch.bincount(of_each, minlength=len(self.response_lengths))
        return replace(self, **selected, response_lengths=lengths)

    def to(self, device: torch.device | str) -> "PackedRow":
        """Return the row with its tensors on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        if self.shared_keys is not None:
            moved["shared_keys"] = tuple(keys.to(device) for keys in self.shared_keys)
        return replace(self, **moved)


_Range = tuple[int, int]  # of tokens of a packed row: the first one, and their number


class Branch(NamedTuple):
    """Where a response leaves the order of its tokens, and goes on from an earlier one."""

    sequence: int  # the sequence, 0 to S - 1
    start: int  # the first token of the branch in the response, 0 to n_r - 1
    parent: int  # the token that it goes on from, in prompt and response, below n_p + start; -1: it begins from nothing


def pack_row(
    prompt_ids: Tensor,
    prompt_lengths: Tensor | NDArray[np.int64],
    response_ids: Tensor,
    response_lengths: Tensor | NDArray[np.int64],
    experts: tuple[Tensor, Tensor] | None = None,
    *,
    share_prompts: bool = False,
    branches: Sequence[Branch] = (),
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
        branches: The branches of responses, ordered by sequence and start.

    Returns:
        The row, on the device of `prompt_ids`. A branch that begins from nothing has a first token that nothing
        predicts; its log-prob is then one of itself, and has no meaning.

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
        >>> one = torch.tensor([2]), torch.tensor([12, 13, 22, 23]), torch.tensor([4])
        >>> row = pack_row(torch.tensor([10, 11]), *one, branches=[Branch(0, 2, 1)])
        >>> row.input_ids.tolist(), row.position_ids.tolist(), row.cu_seqlens.tolist()
        ([10, 11, 12, 13, 22, 23], [0, 1, 2, 3, 2, 3], [0, 4, 6])
        >>> row.predict_index.tolist(), row.shared_keys[0].index.tolist()
        ([1, 2, 1, 4], [0, 1, 2, 3, 0, 1, 4, 5])
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
    parts = _Parts(
        own,
        prompts + responses - own,
        torch.stack([starts[first], response_starts], dim=1),
        torch.stack([prompts, responses], dim=1),
    )
    if branches:
        parts, parents = parts.split(branches)
        at = torch.tensor([start for _, start, _ in branches], device=device)
        at += (responses.cumsum(0) - responses)[[sequence for sequence, _, _ in branches]]
        predict_index[at] = torch.where(parents < 0, response_index[at], parents)
    return PackedRow(
        input_ids=input_ids,
        position_ids=_concatenate_ranges(parts.depths, parts.own),
        cu_seqlens=_boundaries(parts.own[parts.own > 0]),
        predict_index=predict_index,
        targets=targets,
        response_lengths=responses,
        max_seqlen=int(parts.lengths.sum(1).max()),
        experts=_packed_experts(len(input_ids), (prompt_index, response_index), experts) if experts else None,
        shared_keys=None if has_prompt.all() and not branches else _shared_keys(parts),
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


@dataclass(frozen=True, eq=False)
class _Parts:
    """The parts of a packed row whose tokens follow each other: sequences, or what branches divide them into."""

    own: Tensor  # [Q] int64, the tokens of each that are nowhere before in the row
    depths: Tensor  # [Q] int64, the position of the first of these
    starts: (
        Tensor  # [Q, K] int64, where the tokens are in the row that each attends to, in up to K ranges; own ones last
    )
    lengths: Tensor  # [Q, K] int64, of these ranges

    def split(self, branches: Sequence[Branch]) -> tuple["_Parts", Tensor]:
        """Divide sequences, of a prompt and a response each, by their branches; also return where parents are, or -1.

        A branch must be within its response, after its parent, and in order.
        """
        divided: list[tuple[int, int, list[_Range]]] = []
        parents: list[int] = []
        of_sequence = {at: list(each) for at, each in groupby(branches, key=lambda branch: branch.sequence)}
        for at, (own, *ranges) in enumerate(torch.cat([self.own[:, None], self.starts, self.lengths], dim=1).tolist()):
            (prompt, response), (num_prompt, num_response) = ranges[:2], ranges[2:]
            mine = of_sequence.pop(at, [])
            stops = [*(branch.start for branch in mine), num_response]
            paths: list[list[_Range]] = [[(prompt, num_prompt), (response, stops[0])]]
            divided.append((own - num_response + stops[0], num_prompt + num_response - own, paths[0]))
            for (_, start, parent), stop in zip(mine, stops[1:], strict=True):
                if not (0 <= start < stop and -1 <= parent < num_prompt + start):
                    raise ValueError(
                        f"a branch of sequence {at} can't go from token {parent} to response token {start}"
                    )
                path = _path_to(parent, prompt, num_prompt, response, paths)
                parents.append(sum(path[-1]) - 1 if path else -1)
                divided.append(
                    (stop - start, sum(length for _, length in path), [*path, (response + start, stop - start)])
                )
                paths.append(divided[-1][2])
        if of_sequence:
            raise ValueError(f"branches of sequences {sorted(of_sequence)} are not in order, or of none in the row")
        width = max(len(ranges) for _, _, ranges in divided)
        table = torch.tensor([[(0, 0)] * (width - len(ranges)) + ranges for _, _, ranges in divided])
        sizes = torch.tensor([(own, depth) for own, depth, _ in divided])
        device = self.own.device
        found = (each.to(device) for each in (sizes[:, 0], sizes[:, 1], table[..., 0], table[..., 1]))
        return _Parts(*found), torch.tensor(parents, device=device)


def _path_to(
    parent: int, prompt: int, num_prompt: int, response: int, paths: Sequence[Sequence[_Range]]
) -> list[_Range]:
    """Return the ranges of the tokens up to a sequence's token, in the parts that it has so far."""
    if parent < num_prompt:
        return [(prompt, parent + 1)] if parent >= 0 else []
    place = response + parent - num_prompt
    (*before, (start, _)) = next(path for path in reversed(paths) if path[-1][0] <= place)
    return [*before, (start, place - start + 1)]


def _shared_keys(parts: _Parts) -> tuple[SharedKeys, ...]:
    """Return the keys of all parts that have tokens of their own, from where their ranges begin in the row."""
    present = parts.own > 0
    own, starts, lengths = parts.own[present], parts.starts[present], parts.lengths[present]
    at_once = _cut(lengths.sum(1), KEYS_PER_TOKEN * int(own.sum()))
    return tuple(
        SharedKeys(
            int(queries.sum()),
            _boundaries(queries),
            _concatenate_ranges(begins.flatten(), sizes.flatten()),
            _boundaries(sizes.sum(1)),
        )
        for queries, begins, sizes in zip(*(torch.split(each, at_once) for each in (own, starts, lengths)), strict=True)
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


def _packed_experts(num_tokens: int, indices: tuple[Tensor, Tensor], experts: tuple[Tensor, Tensor]) -> Tensor:
    packed = experts[0].new_empty(num_tokens, experts[0].shape[1])
    for index, part in zip(indices, experts, strict=True):
        packed[index] = part
    return packed


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
