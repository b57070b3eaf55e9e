"""Penalty and mask for responses that reach, or nearly reach, the token limit."""

from pydantic import NonNegativeFloat, NonNegativeInt

from schemas.base import FrozenConfig


class OverlongConfig(FrozenConfig):
    """DAPO's soft overlong punishment and overlong filtering (Yu et al. 2025, arXiv:2503.14476, section 3.4)."""

    buffer_tokens: NonNegativeInt = 0
    """The penalty grows linearly over this many last tokens before the response limit; 0: no penalty."""

    penalty: NonNegativeFloat = 1.0
    """Subtracted from the reward of a response at the limit, in units of the reward."""

    mask_truncated: bool = False
    """Don't train on responses cut off by the limit; they still count in their group's baseline."""
