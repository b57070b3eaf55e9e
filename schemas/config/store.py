"""The column store (backend, capacity, retention), and checkpoints of the policy."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from schemas.base import FrozenConfig, OptionalText
from schemas.config.kinds import default_kind


def _check_keep_steps(value: object) -> object:
    """Check it here, as the errors of a union name its members."""
    if value == "all" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ValueError("expected a number of steps, 0 or more, or 'all'")


KeepSteps = Annotated[NonNegativeInt | Literal["all"], BeforeValidator(_check_keep_steps)]


class _Limits(FrozenConfig):
    capacity_bytes: PositiveInt = 2**30
    """Capacity in bytes, for all open steps together."""

    put_timeout_seconds: NonNegativeFloat = 60
    """Seconds that a put waits at full capacity for other steps to be cleared."""


class SharedStore(_Limits):
    """The nodes' shared memory: as fast as memory, and lost with the Ray cluster."""

    kind: Literal["shared"] = "shared"

    keep_steps: Literal[0] = 0
    """Always 0: finished steps are not kept."""

    @property
    def keep_bytes(self) -> None:
        """Whether kept steps have a limit, as they have in durable stores."""
        return None

    @property
    def is_durable(self) -> bool:
        """Whether columns outlive the Ray cluster."""
        return False


class _Durable(_Limits):
    url: OptionalText = None
    """Any fsspec URL for the columns, e.g. `s3://bucket/prefix`; None: `columns/` in the run directory."""

    keep_steps: KeepSteps = 1
    """Number of finished steps that stay readable, e.g. for `sluice inspect`; 0: none; "all": every one, for good."""

    keep_bytes: PositiveInt | None = None
    """Limit on the bytes of the kept steps, beyond which the oldest go, but never the newest; None: no limit."""

    compression: Literal["none", "lz4", "zstd"] = "none"
    """Compression of the files; a read of some rows of a compressed file reads it whole."""

    @property
    def is_durable(self) -> bool:
        """Whether columns outlive the Ray cluster."""
        return True


class FsspecStore(_Durable):
    """Arrow IPC files under a URL that every worker can reach."""

    kind: Literal["fsspec"] = "fsspec"


class TieredStore(_Durable):
    """Shared memory in front of files: reads are fast, and columns outlive the Ray cluster."""

    kind: Literal["tiered"] = "tiered"


StoreConfig = Annotated[
    Annotated[SharedStore | FsspecStore | TieredStore, Field(discriminator="kind")], default_kind("tiered")
]


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
