"""What is done about responses that are (nearly) as long as they may be."""

from pydantic import NonNegativeFloat, NonNegativeInt

from schemas.base import Frozen


class OverlongConfig(Frozen):
    """DAPO's soft overlong punishment and overlong filtering (Yu et al. 2025, arXiv:2503.14476, section 3.4)."""

    buffer_tokens: NonNegativeInt = 0  # the last tokens before the limit, over which the penalty grows; 0: none
    penalty: NonNegativeFloat = 1.0  # taken off the reward at the limit
    mask_truncated: bool = False  # responses cut off by the limit count in their group's baseline but aren't trained
