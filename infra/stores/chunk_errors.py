"""The errors of puts and reads that every backend words the same way."""

from pathlib import Path

from schemas.batch import ChunkKey, ChunkRef
from schemas.errors import (
    CapacityError,
    ChunkNotFoundError,
    LeaseError,
    LeaseExpiredError,
    StaleIncarnationError,
    StoreError,
    WorkerLostError,
)


def check_incarnation(ref: ChunkRef, incarnation: str) -> None:
    """Check that a reference is of this incarnation of the store.

    Raises:
        StaleIncarnationError: It is of another one.
    """
    if ref.incarnation != incarnation:
        raise StaleIncarnationError(
            f"chunk {ref.key} was put into store {ref.incarnation}, which is gone; this is {incarnation}: "
            "run the stage that produces it again"
        )


def chunk_not_found_error(ref: ChunkRef, *, lease_expired: bool) -> ChunkNotFoundError:
    """Return the error for a chunk that is not in the store."""
    reason = "the lease of its step expired" if lease_expired else "its step was cleared, or it was never put"
    return ChunkNotFoundError(f"chunk {ref.key} is not in the store: {reason}")


def no_lease_error(key: ChunkKey) -> LeaseError:
    """Return the error for a put without a lease."""
    return LeaseError(
        f"can't put {key}: step {key.step} has no open lease; open one first (the step may have been cleared)"
    )


def lease_expired_error(key: ChunkKey, lease_seconds: float) -> LeaseExpiredError:
    """Return the error for a put under an expired lease."""
    return LeaseExpiredError(
        f"can't put {key}: the lease of step {key.step} expired, as it was not renewed for {lease_seconds:g} s, "
        "and its chunks were freed; raise store.lease_seconds, or just resume the run"
    )


def capacity_error(key: ChunkKey, requested: int, held: int, limit: int) -> CapacityError:
    """Return the error for a put that would exceed the store's capacity."""
    return CapacityError(
        f"can't put {key}: {requested} bytes requested, {held} held, limit {limit}; "
        "raise store.capacity_bytes, and resume the run"
    )


def shared_memory_full_error(key: ChunkKey, folder: Path) -> CapacityError:
    """Return the error for a chunk that doesn't fit into a node's shared memory."""
    return CapacityError(
        f"can't put {key}: the file system of {folder} is full; enlarge it (for Docker: --shm-size), lower "
        "store.capacity_bytes, or set runtime.shared_memory to a folder with more space"
    )


def removed_folder_error(key: ChunkKey, folder: Path) -> StoreError:
    """Return the error for a put into a folder that is gone although its column server lives."""
    return StoreError(f"can't put {key}: {folder} was removed under a living run")


def lost_chunk_error(ref: ChunkRef, location: str, error: Exception) -> ChunkNotFoundError:
    """Return the error for a chunk on a node that can't be reached."""
    return ChunkNotFoundError(f"chunk {ref.key} is lost with its node's column server at {location}: {error}")


def lost_store_error(run_id: str, error: Exception) -> WorkerLostError:
    """Return the error for a store whose index can't be reached."""
    return WorkerLostError(f"the column store of run {run_id} is gone, with the columns that it held: {error}")
