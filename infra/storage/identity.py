"""Which run a directory holds: what its processes, store and GPUs are named by, made once and never shared.

A run's id is the name of its directory, which another folder may hold as well: in another project, or in a copy.
"""

import logging
import re
import secrets

from infra.storage import places
from infra.storage.folder import Folder, read_record
from infra.storage.runs import RunDirectory, open_folder
from schemas.base import Frozen
from schemas.config.run import RunConfig
from schemas.errors import PipelineError, RunError

_FILE = "identity.json"
_SUFFIX = re.compile(r"\.[0-9a-f]{8}$")

logger = logging.getLogger(__name__)


class _Record(Frozen):
    """A directory's identity, and where it was made or last moved to."""

    identity: str
    place: str


def new_identity(run_id: str) -> str:
    """Return an identity for a run of that id: no other run has it."""
    return f"{run_id}.{secrets.token_hex(4)}"


def run_id_of(identity: str) -> str:
    """Return the id of the run that has an identity."""
    return _SUFFIX.sub("", identity)


def claim_identity(directory: RunDirectory, config: RunConfig) -> str:
    """Return a run's identity, which the first caller makes; the caller holds the run's lock.

    A directory that was moved keeps it. A copy, whose original is still there, gets one of its own and says so: it may
    run next to the original, and touches nothing of it.

    Raises:
        RunError: `checkpoint.url` or `store.url` holds what another run of the same id has written.
    """
    record = _read(directory.folder)
    if record is None:
        record = _write(directory, new_identity(directory.run_id))
    elif _is_copy(directory, record):
        logger.warning(
            "%s is a copy of the run in %s: it is a run of its own from here on, with its own workers and columns",
            *(directory.url, record.place),
        )
        record = _write(directory, new_identity(directory.run_id))
    elif record.place != directory.url:
        record = _write(directory, record.identity)
    for key, url in {"checkpoint.url": config.checkpoint.url, "store.url": getattr(config.store, "url", None)}.items():
        if url:
            _claim_place(key, places.join(places.resolve(url), directory.run_id), record)
    return record.identity


def identity_of(directory: RunDirectory) -> str:
    """Return a run's identity; before it has one, its id, by which nothing is named yet."""
    record = _read(directory.folder)
    return record.identity if record else directory.run_id


def owns_place(directory: RunDirectory, url: str) -> bool:
    """Return whether a run's folder at a URL holds its own files, and not those of the run that it is a copy of."""
    found, record = _read(open_folder(places.join(places.resolve(url), directory.run_id))), _read(directory.folder)
    if found is None or record is None:
        return found is None
    return found.identity == record.identity and not _is_copy(directory, record)


def _claim_place(key: str, place: str, record: _Record) -> None:
    """Write the run's identity to its folder at a URL that other runs may be given, too."""
    folder = open_folder(place)
    if (found := _read(folder)) is not None and found.identity != record.identity:
        raise RunError(
            f"{place} is in use by the run of the same id in {found.place}; set {key} to another place, or start this "
            "run under another id"
        )
    if found != record:
        folder.write(_FILE, record.model_dump_json().encode())


def _write(directory: RunDirectory, identity: str) -> _Record:
    record = _Record(identity=identity, place=directory.url)
    directory.folder.write(_FILE, record.model_dump_json().encode())
    return record


def _read(folder: Folder) -> _Record | None:
    return read_record(folder, _FILE, _Record, "remove it, and the run gets a new identity")


def _is_copy(directory: RunDirectory, record: _Record) -> bool:
    """Return whether the run that the record was written for is another one, and still there."""
    original = None if record.place == directory.url else _read_elsewhere(record.place)
    is_there = original is not None and original.identity == record.identity
    return is_there and not _is_same(RunDirectory(record.place), directory)


def _is_same(one: RunDirectory, other: RunDirectory) -> bool:
    """Return whether two places are one directory, which has several paths."""
    return one.is_local and other.is_local and one.path.samefile(other.path)


def _read_elsewhere(place: str) -> _Record | None:
    try:
        return _read(RunDirectory(place).folder)
    except (OSError, PipelineError):  # it is on another machine, or not reachable from here
        return None
