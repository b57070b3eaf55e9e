"""The column store of a run, by its configuration."""

from pathlib import Path

from infra.storage.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.stores.fsspec import NO_EXPIRY_SECONDS, NO_LIMIT, FsspecColumnStore
from infra.stores.tiered import TieredColumnStore
from rl_core.registry import Registry, entry
from schemas.config.run import RunConfig
from schemas.config.store import FsspecStore, RayStore, StoreConfig, TieredStore
from schemas.errors import WorkerLostError
from schemas.step import RunHandle

_clients: dict[Path, ColumnStore] = {}  # of this process, by run directory: opening one takes several round trips


def open_store(run: RunHandle) -> ColumnStore:
    """Return this process's client of the run's store, opened once.

    Raises:
        WorkerLostError: The store's registry is gone.
    """
    directory = RunDirectory.of(run)
    if directory.path not in _clients:
        _clients[directory.path] = _open(directory, run.config.store, start=False)
    return _clients[directory.path]


def start_store(directory: RunDirectory, config: RunConfig) -> tuple[ColumnStore, bool]:
    """Return a new client of the run's store, and whether it had to be started, so that what it held in Ray is lost."""
    _clients.pop(directory.path, None)  # its registry may be gone
    try:
        return _open(directory, config.store, start=False), False
    except WorkerLostError:
        return _open(directory, config.store, start=True), True


def open_files(
    directory: RunDirectory, config: FsspecStore | TieredStore, *, read_only: bool = False
) -> FsspecColumnStore:
    """Return the run's durable columns, without Ray."""
    # In a tiered store, the front enforces the limits, and a dead run's files are kept until it is resumed.
    is_tiered = isinstance(config, TieredStore)
    return FsspecColumnStore(
        directory.run_id,
        f"{config.url.rstrip('/')}/{directory.run_id}" if config.url else str(directory.columns),
        NO_LIMIT if is_tiered else config.capacity_bytes,
        put_timeout_seconds=config.put_timeout_seconds,
        lease_seconds=NO_EXPIRY_SECONDS if is_tiered else config.lease_seconds,
        read_only=read_only,
    )


def _open(directory: RunDirectory, config: StoreConfig, *, start: bool) -> ColumnStore:
    return OPENERS(config, directory, start)


def _open_fsspec(config: FsspecStore, directory: RunDirectory, start: bool) -> ColumnStore:
    return open_files(directory, config)


def _open_ray(config: RayStore, directory: RunDirectory, start: bool) -> ColumnStore:
    return _open_registry(directory.run_id, config, start)


def _open_tiered(config: TieredStore, directory: RunDirectory, start: bool) -> ColumnStore:
    durable = open_files(directory, config)
    return TieredColumnStore(_open_registry(directory.run_id, config, start, durable.incarnation), durable)


def _open_registry(
    run_id: str, config: RayStore | TieredStore, start: bool, incarnation: str | None = None
) -> ColumnStore:
    from infra.stores.ray import RayColumnStore  # not at the top: a process that only reads files doesn't need Ray

    return RayColumnStore(
        run_id,
        config.capacity_bytes if start else None,
        put_timeout_seconds=config.put_timeout_seconds,
        lease_seconds=config.lease_seconds,
        incarnation=incarnation,
    )


OPENERS = Registry(
    "infra.stores.open.OPENERS",
    StoreConfig,
    entry(RayStore, _open_ray),
    entry(FsspecStore, _open_fsspec),
    entry(TieredStore, _open_tiered),
)
