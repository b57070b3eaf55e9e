"""Checkpoints of the policy."""

from pydantic import PositiveInt

from schemas.base import FrozenConfig, OptionalText


class CheckpointConfig(FrozenConfig):
    """Checkpoints; a run resumes from the newest complete one after its policy workers were lost."""

    every_steps: PositiveInt = 1
    """Steps between two checkpoints."""

    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""

    keep_best: bool = True
    """Also keep the checkpoint with the best held-out accuracy."""

    url: OptionalText = None
    """Any fsspec URL for the checkpoints, e.g. `s3://bucket/prefix`; None: `policy/` in the run directory."""
