"""What the column store holds, and what goes in and out of it."""

from pydantic import NonNegativeInt

from schemas.base import Frozen


class StoreUsage(Frozen):
    """What the column store holds under leases, as its registry counts it over all of its clients."""

    num_chunks: NonNegativeInt
    num_rows: NonNegativeInt
    num_bytes: NonNegativeInt
    peak_bytes: NonNegativeInt
    capacity_bytes: NonNegativeInt
    leaked_bytes: NonNegativeInt = 0  # of chunks whose lease is over; the next sweep frees them
    open_leases: tuple[int, ...] = ()  # steps, in order


class StoreTraffic(Frozen):
    """What one process put into the column store and read from it, over a stretch of its work."""

    num_puts: NonNegativeInt = 0
    put_bytes: NonNegativeInt = 0
    put_seconds: float = 0.0
    num_reads: NonNegativeInt = 0
    read_bytes: NonNegativeInt = 0  # of the columns that were returned, mapped or copied
    read_seconds: float = 0.0

    def __add__(self, other: "StoreTraffic") -> "StoreTraffic":
        theirs = dict(other)
        return StoreTraffic(**{name: value + theirs[name] for name, value in self})
