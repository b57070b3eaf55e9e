"""Columns of the axis `turn` by token."""

import numpy as np
import pyarrow as pa

from rl_core.columns.jagged import Array, flat_values

TURN_COLUMNS = ("turn_advantages", "turn_tokens", "turn_bridge_tokens")


def advantages_of_turns(advantages: pa.Array, sampled: pa.Array, between: pa.Array) -> Array:
    """Return the advantage of each response token of all rows, which is that of its turn, up to the next one.

    Args:
        advantages: `TURN_COLUMNS[0]`.
        sampled: `TURN_COLUMNS[1]`, the tokens of each turn.
        between: `TURN_COLUMNS[2]`, the tokens that follow them.

    Returns:
        [T] float32.
    """
    return np.repeat(flat_values(advantages), flat_values(sampled) + flat_values(between))
