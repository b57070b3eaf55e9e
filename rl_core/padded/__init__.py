"""Padded batches of other trainers: `nest` removes the padding, `unnest` restores it, `TRL` and `VERL` are layouts."""

from rl_core.padded.layouts import TRL, VERL, Geometry, PaddedLayout
from rl_core.padded.removal import Nested, nest
from rl_core.padded.restoration import unnest

__all__ = ["TRL", "VERL", "Geometry", "Nested", "PaddedLayout", "nest", "unnest"]
