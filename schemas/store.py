"""The column store's usage, and a process's traffic with it."""

from collections.abc import Iterable

from pydantic import ConfigDict, NonNegativeInt

from schemas.base import Frozen


class StoreUsage(Frozen):
    """What the column store holds of open steps, as its index counts it over all clients."""

    model_config = ConfigDict(extra="ignore")  # reports of earlier versions have fields that are gone

    num_chunks: NonNegativeInt
    num_rows: NonNegativeInt
    num_bytes: NonNegativeInt
    peak_bytes: NonNegativeInt
    capacity_bytes: NonNegativeInt
    open_steps: tuple[int, ...] = ()  # in order


class StoreTraffic(Frozen):
    """One process's puts into the column store and reads from it, over some period."""

    num_puts: NonNegativeInt = 0
    put_bytes: NonNegativeInt = 0
    put_seconds: float = 0.0
    num_reads: NonNegativeInt = 0
    read_bytes: NonNegativeInt = 0  # of the returned columns, whether mapped or copied
    read_seconds: float = 0.0

    @classmethod
    def total(cls, parts: "Iterable[StoreTraffic]") -> "StoreTraffic":
        """Add the traffic of several processes or periods."""
        columns = zip(*((value for _, value in part) for part in parts), strict=True)
        return cls(**dict(zip(cls.model_fields, map(sum, columns), strict=False)))

    def __add__(self, other: "StoreTraffic") -> "StoreTraffic":
        theirs = dict(other)
        return StoreTraffic(**{name: value + theirs[name] for name, value in self})
