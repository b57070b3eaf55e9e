"""Which store a run's configuration means, and how its processes come by it."""

from infra.storage.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.stores.fsspec import NO_EXPIRY_SECONDS, NO_LIMIT, FsspecColumnStore
from infra.stores.ray import RayColumnStore
from infra.stores.tiered import TieredColumnStore
from schemas.config.run import RunConfig
from schemas.config.store import FsspecStore, RayStore, StoreConfig, TieredStore
from schemas.errors import WorkerLostError
from schemas.step import RunHandle


def open_store(run: RunHandle) -> ColumnStore:
    """This process's client of the run's store.

    Raises:
        WorkerLostError: The store's registry is gone.
    """
    return _open(RunDirectory.of(run), run.config.store, start=False)


def start_store(directory: RunDirectory, config: RunConfig) -> tuple[ColumnStore, bool]:
    """The run's store, and whether it had to be started anew, so that what it held in Ray is lost."""
    try:
        return _open(directory, config.store, start=False), False
    except WorkerLostError:
        return _open(directory, config.store, start=True), True


def _open(directory: RunDirectory, config: StoreConfig, start: bool) -> ColumnStore:
    if isinstance(config, RayStore):
        return _ray(directory.run_id, config, None, start)
    behind = open_files(directory, config)
    if isinstance(config, FsspecStore):
        return behind
    return TieredColumnStore(_ray(directory.run_id, config, behind.incarnation, start), behind)


def _ray(run_id: str, config: RayStore | TieredStore, incarnation: str | None, start: bool) -> RayColumnStore:
    return RayColumnStore(
        run_id,
        config.capacity_bytes if start else None,
        put_timeout_seconds=config.put_timeout_seconds,
        lease_seconds=config.lease_seconds,
        incarnation=incarnation,
    )


def open_files(
    directory: RunDirectory, config: FsspecStore | TieredStore, *, read_only: bool = False
) -> FsspecColumnStore:
    """The run's durable columns, without Ray."""
    has_front = isinstance(config, TieredStore)  # it keeps the limits; a dead run's files wait for its resume
    return FsspecColumnStore(
        directory.run_id,
        f"{config.url.rstrip('/')}/{directory.run_id}" if config.url else str(directory.columns),
        NO_LIMIT if has_front else config.capacity_bytes,
        put_timeout_seconds=config.put_timeout_seconds,
        lease_seconds=NO_EXPIRY_SECONDS if has_front else config.lease_seconds,
        read_only=read_only,
    )
