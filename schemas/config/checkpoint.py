"""When the policy is saved, where, and what is kept."""

from pydantic import PositiveInt

from schemas.base import Frozen


class CheckpointConfig(Frozen):
    """Checkpoints; the newest complete one is where a run goes on after its policy workers were lost."""

    every_steps: PositiveInt = 1
    keep_last: PositiveInt = 2
    keep_best: bool = True  # also keep the one with the best held-out accuracy
    url: str | None = None  # any fsspec URL, e.g. s3://bucket/prefix; None: the run directory's `policy/`
