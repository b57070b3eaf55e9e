"""Which store a run's configuration means, and how its processes come by it."""

from infra.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.stores.files import NO_EXPIRY_SECONDS, FsspecColumnStore
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


def open_files(directory: RunDirectory, config: RunConfig) -> FsspecColumnStore | None:
    """The run's durable columns, without Ray; None where its store keeps none."""
    return None if isinstance(config.store, RayStore) else _files(directory, config.store, read_only=True)


def _open(directory: RunDirectory, config: StoreConfig, start: bool) -> ColumnStore:
    if isinstance(config, RayStore):
        return _ray(directory.run_id, config, None, start)
    behind = _files(directory, config)
    if isinstance(config, FsspecStore):
        return behind
    return TieredColumnStore(_ray(directory.run_id, config, behind.generation, start), behind)


def _ray(run_id: str, config: RayStore | TieredStore, generation: str | None, start: bool) -> RayColumnStore:
    return RayColumnStore(
        run_id,
        config.capacity_bytes if start else None,
        put_timeout_seconds=config.put_timeout_seconds,
        lease_seconds=config.lease_seconds,
        generation=generation,
    )


def _files(directory: RunDirectory, config: FsspecStore | TieredStore, read_only: bool = False) -> FsspecColumnStore:
    url = f"{config.url.rstrip('/')}/{directory.run_id}" if config.url else str(directory.columns)
    if isinstance(config, TieredStore):  # the front keeps the limits; a dead run's files wait for its resume
        return FsspecColumnStore(directory.run_id, url, lease_seconds=NO_EXPIRY_SECONDS, read_only=read_only)
    return FsspecColumnStore(
        directory.run_id,
        url,
        config.capacity_bytes,
        put_timeout_seconds=config.put_timeout_seconds,
        lease_seconds=config.lease_seconds,
        read_only=read_only,
    )
