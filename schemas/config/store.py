"""Where columns live, how much of them, and for how long."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from schemas.base import Frozen
from schemas.config.kinds import default_kind


class _Limits(Frozen):
    capacity_bytes: PositiveInt = 2**30  # of all leased steps together
    put_timeout_seconds: NonNegativeFloat = 60  # a put waits so long for other steps' bytes to be cleared
    lease_seconds: PositiveFloat = 3600  # a step that nobody renews, reads or writes for so long is freed


class RayStore(_Limits):
    """Ray's object store: as fast as memory, and lost with the Ray cluster."""

    kind: Literal["ray"] = "ray"
    keep_steps: Literal[0] = 0

    @property
    def is_durable(self) -> bool:
        return False


class _Durable(_Limits):
    url: str | None = None  # any fsspec URL, e.g. s3://bucket/prefix; None: the run directory's `columns/`
    keep_steps: NonNegativeInt = 1  # so many finished steps stay readable, for people

    @property
    def is_durable(self) -> bool:
        return True


class FsspecStore(_Durable):
    """Arrow IPC files under a URL that every worker reaches."""

    kind: Literal["fsspec"] = "fsspec"


class TieredStore(_Durable):
    """Ray's object store in front, files behind: reads are fast, and columns outlive the Ray cluster."""

    kind: Literal["tiered"] = "tiered"


StoreConfig = Annotated[
    Annotated[RayStore | FsspecStore | TieredStore, Field(discriminator="kind")], default_kind("tiered")
]
