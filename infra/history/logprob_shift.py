"""How much an update shifts the log-probs of the tokens that it trained on. N rows, T response tokens."""

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from infra.history.stored_step import StoredStep
from rl_core.columns.jagged import flat_values, row_lengths
from schemas.base import Frozen


class LogprobShift(Frozen):
    """A token, and the change of its log-prob by the same step's update in runs A and B."""

    row: int  # of the rollout's N rows
    token: int  # its position in the response
    text: str
    a: float  # nats
    b: float


def largest_shifts(
    stored: StoredStep,
    a: Sequence[pa.Array],
    b: Sequence[pa.Array],
    texts: Callable[[pa.Array], pa.Array],
    count: int,
) -> tuple[LogprobShift, ...]:
    """Return the trained tokens that either update shifts most, the largest first.

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
