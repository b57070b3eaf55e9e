"""The column store of a run, by its configuration."""

from contextlib import suppress

from infra.storage import places
from infra.storage.identity import identity_of
from infra.storage.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.stores.chunk_files import STORE_PATH, StoreRecord, load_record
from infra.stores.files import NO_LIMIT, FsspecColumnStore, ReplayColumnStore, require_own
from infra.stores.shared.client import SharedColumnStore
from infra.stores.tiered import TieredColumnStore
from rl_core.registry import Registry, entry
from schemas.config.run import RunConfig
from schemas.config.store import FsspecStore, SharedStore, StoreConfig, TieredStore
from schemas.errors import StoreError, WorkerLostError
from schemas.step import RunHandle

_clients: dict[str, ColumnStore] = {}  # of this process, by run directory: opening one takes several round trips


def open_store(run: RunHandle) -> ColumnStore:
    """Return this process's client of the run's store, opened once.

    Raises:
        WorkerLostError: The store's index is gone.
    """
    directory = RunDirectory.of(run)
    if directory.url not in _clients:
        _clients[directory.url] = _open_replay(run) if run.source else _open(directory, run.config, start=False)
    return _clients[directory.url]


def forget_store(run: RunHandle) -> None:
    """Drop this process's client of the run's store, whose files are about to be removed."""
    _clients.pop(RunDirectory.of(run).url, None)


def start_store(directory: RunDirectory, config: RunConfig) -> tuple[ColumnStore, bool]:
    """Return a new client of the run's store, and whether it had to be started, so that what it held is lost."""
    _clients.pop(directory.url, None)  # its index may be gone
    try:
        return _open(directory, config, start=False), False
    except WorkerLostError:
        return _open(directory, config, start=True), True


def close_store(directory: RunDirectory, config: RunConfig) -> None:
    """End the index of the run's shared columns if there is one, with what it holds; durable columns stay."""
    _clients.pop(directory.url, None)
    if isinstance(config.store, FsspecStore):
        return
    with suppress(WorkerLostError):
        _open_index(directory, config, start=False).close()


def open_files(
    directory: RunDirectory, config: FsspecStore | TieredStore, *, read_only: bool = False
) -> FsspecColumnStore:
    """Return the run's durable columns, without Ray."""
    return FsspecColumnStore(
        directory.run_id,
        places.join(config.url, directory.run_id) if config.url else directory.columns,
        NO_LIMIT if isinstance(config, TieredStore) else config.capacity_bytes,  # its front enforces the limit
        put_timeout_seconds=config.put_timeout_seconds,
        compression=None if config.compression == "none" else config.compression,
        read_only=read_only,
    )


def check_name(directory: RunDirectory) -> None:
    """Check that a run's directory has the name that its columns have.

    Raises:
        RunError: It was renamed, or copied under another name.
    """
    if (record := load_record(directory.folder, f"columns/{STORE_PATH}", StoreRecord)) is not None:
        require_own(record, directory.run_id, directory.columns)


def _open_replay(run: RunHandle) -> ReplayColumnStore:
    """Return the columns that a replay puts, over those of the run that it replays."""
    assert run.source is not None
    source = RunDirectory(run.source)
    store = source.config().store
    if isinstance(store, SharedStore):
        raise StoreError(f"run {source.run_id} keeps no columns on disk, so that none can be replayed")
    return ReplayColumnStore(run.run_id, RunDirectory.of(run).columns, open_files(source, store, read_only=True))


def _open(directory: RunDirectory, config: RunConfig, *, start: bool) -> ColumnStore:
    return OPENERS(config.store, directory, config, start)


def _open_fsspec(store: FsspecStore, directory: RunDirectory, config: RunConfig, start: bool) -> ColumnStore:
    return open_files(directory, store)


def _open_shared(store: SharedStore, directory: RunDirectory, config: RunConfig, start: bool) -> ColumnStore:
    return _open_index(directory, config, start)


def _open_tiered(store: TieredStore, directory: RunDirectory, config: RunConfig, start: bool) -> ColumnStore:
    durable = open_files(directory, store)
    return TieredColumnStore(_open_index(directory, config, start, durable.incarnation), durable)


def _open_index(
    directory: RunDirectory, config: RunConfig, start: bool, incarnation: str | None = None
) -> SharedColumnStore:
    # Not at the top: a process that only reads files doesn't need Ray.
    from infra.ray.health import run_owner
    from infra.stores.shared.flight import Tls
    from infra.stores.shared.index import find_shared_store, start_shared_store
    from infra.stores.shared.node_files import Limits

    if not start:
        return find_shared_store(directory.run_id, identity_of(directory))
    store, services = config.store, config.services
    tls = Tls(services.tls_certificate, services.tls_key) if services.tls_certificate and services.tls_key else None
    limits = Limits(
        store.capacity_bytes,
        store.put_timeout_seconds,
        config.runtime.shared_memory,
        tls,
        owner=run_owner(),
        driver_seconds=config.timeouts.driver_seconds,
    )
    identity = identity_of(directory)
    started = start_shared_store(directory.run_id, limits, identity=identity, incarnation=incarnation)
    directory.write_store_endpoint(*started.endpoint)
    return started


OPENERS = Registry(
    "infra.stores.open.OPENERS",
    StoreConfig,
    entry(SharedStore, _open_shared),
    entry(FsspecStore, _open_fsspec),
    entry(TieredStore, _open_tiered),
)
