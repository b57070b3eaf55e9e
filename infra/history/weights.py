"""Comparison of checkpoints: whether two hold the same bits, and what two updates changed: weights and log-probs."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from infra.checkpoints import CheckpointStore
from infra.checkpoints.shards import SUFFIX
from infra.checkpoints.state import MODEL
from infra.history.diff import Difference, compare_columns
from infra.history.stored_step import StoredStep
from rl_core.columns.jagged import flat_values, row_lengths
from schemas.base import Frozen


class UpdateChange(Frozen):
    """How the change of the weights that one step made in run B compares to that in run A."""

    cosine: float | None  # of the two changes as vectors; None: one of them is 0
    norm_ratio: float | None  # |B| / |A|
    norm_a: float
    norm_b: float


class LogprobShift(Frozen):
    """A token, and the change of its log-prob by the same step's update in runs A and B."""

    row: int  # of the rollout's N rows
    token: int  # its position in the response
    text: str
    a: float  # nats
    b: float


def compare_checkpoints(a: CheckpointStore, b: CheckpointStore, version: int) -> tuple[Difference, ...]:
    """Compare the weights and the optimizer's state of a version; nothing: all bits are the same.

    Raises:
        CheckpointError: One of them can't be read.
    """
    if _sums(a, version) == _sums(b, version):
        return ()
    with a.opened(version), b.opened(version):
        names = [set(store.tensor_names(version)) for store in (a, b)]
        found = [_compare(a, b, version, name, names) for name in sorted(names[0] | names[1])]
    return tuple(each for each in found if each is not None)


def compare_updates(a: CheckpointStore, b: CheckpointStore, step: int) -> UpdateChange:
    """Compare what the update of a step changed in both: each has checkpoints of the versions before and after it.

    Raises:
        CheckpointError: One of these can't be read.
    """
    dot = square_a = square_b = 0.0
    with a.opened(step), a.opened(step + 1), b.opened(step), b.opened(step + 1):
        for name in a.tensor_names(step):
            if name.startswith(f"{MODEL}/"):
                own, other = _change(a, step, name), _change(b, step, name)
                dot += float(own @ other)
                square_a += float(own @ own)
                square_b += float(other @ other)
    norm_a, norm_b = math.sqrt(square_a), math.sqrt(square_b)
    return UpdateChange(
        cosine=max(-1.0, min(1.0, dot / (norm_a * norm_b))) if norm_a and norm_b else None,
        norm_ratio=norm_b / norm_a if norm_a else None,
        norm_a=norm_a,
        norm_b=norm_b,
    )


def _sums(store: CheckpointStore, version: int) -> dict[str, str]:
    files = store.read_manifest(version).files
    return {name: entry.checksum for name, entry in files.items() if name.endswith(SUFFIX)}


def _change(store: CheckpointStore, step: int, name: str) -> Tensor:
    """Return the change of a tensor, float64, flat."""
    return (store.read(step + 1, name).double() - store.read(step, name).double()).flatten()


def _compare(
    a: CheckpointStore, b: CheckpointStore, version: int, name: str, names: list[set[str]]
) -> Difference | None:
    if not (name in names[0] and name in names[1]):
        there = ["present" if name in each else "missing" for each in names]
        return Difference(column=name, closeness="differs", a=there[0], b=there[1])
    found = compare_columns(name, *(_array(store.read(version, name)) for store in (a, b)))
    return found.replace(row=None) if found is not None else None


def _array(tensor: Tensor) -> pa.Array:
    return pa.array((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).flatten().numpy())


def largest_shifts(
    stored: StoredStep,
    a: Sequence[pa.Array],
    b: Sequence[pa.Array],
    texts: Callable[[pa.Array], pa.Array],
    count: int,
) -> tuple[LogprobShift, ...]:
    """Return the trained tokens that either update shifts most, the largest first. N rows, T response tokens.

    Args:
        stored: The step.
        a: The log-probs of its tokens before and after A's update, of the axis `response`.
        b: The same of B's.
        texts: Returns tokens' texts.
        count: How many tokens.
    """
    shifts = np.stack([flat_values(after) - flat_values(before) for before, after in (a, b)])
    size = np.where(flat_values(stored.columns["loss_mask"]), np.abs(shifts).max(axis=0), -1.0)
    order = np.argsort(-size, kind="stable")[:count]
    order = order[size[order] >= 0]
    ends = np.cumsum(row_lengths(stored.columns["response_ids"]))
    rows = np.searchsorted(ends, order, side="right")
    starts = np.concatenate([[0], ends])[rows]
    pieces = texts(stored.columns["response_ids"].flatten().take(pa.array(order))).to_pylist()
    return tuple(
        LogprobShift(row=int(row), token=int(at - start), text=text, a=float(shifts[0, at]), b=float(shifts[1, at]))
        for row, at, start, text in zip(rows, order, starts, pieces, strict=True)
    )
