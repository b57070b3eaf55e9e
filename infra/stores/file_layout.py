"""The files of `FsspecColumnStore`, and how its JSON records are read.

    store.json                            the run, and the name of this incarnation of the store
    leases/step-000007.json               until when puts are allowed; removed when the step is archived
    step-000007/_batch.json               the step's newest handle
    step-000007/rollout-0-0.json          a chunk's record: the chunk is committed once this exists
    step-000007/rollout-0-0.<sum>.arrow   its bytes

Paths are made from validated keys, never read from a file.
"""

from pathlib import PurePosixPath
from typing import TypeVar

from pydantic import ValidationError

from infra.storage.folder import Folder
from infra.storage.step_folders import step_folder, step_number
from schemas.base import Frozen
from schemas.batch import ChunkKey
from schemas.errors import ChunkCorruptedError

STORE_PATH = "store.json"
BATCH_NAME = "_batch.json"
DATA_SUFFIX = ".arrow"
LEASES = "leases"  # in a folder of their own: they are listed often, and the steps' folders may be many

Record = TypeVar("Record", bound=Frozen)


def lease_path(step: int) -> str:
    """Return the path of a step's lease."""
    return f"{LEASES}/{step_folder(step)}.json"


def leased_step(path: str) -> int | None:
    """Return the step whose lease has this path."""
    return step_number(PurePosixPath(path).stem)


def batch_path(step: int) -> str:
    """Return the path of a step's newest handle."""
    return f"{step_folder(step)}/{BATCH_NAME}"


def record_path(key: ChunkKey) -> str:
    """Return the path of a chunk's record."""
    return f"{step_folder(key.step)}/{key.stage}-{key.shard}-{key.attempt}.json"


def data_path(key: ChunkKey, checksum: str) -> str:
    """Return the path of a chunk's bytes, which have this checksum."""
    return f"{step_folder(key.step)}/{key.stage}-{key.shard}-{key.attempt}.{checksum}{DATA_SUFFIX}"


def is_record(path: str, step: int) -> bool:
    """Return whether a path is that of a record of one of the step's chunks."""
    parts = PurePosixPath(path)
    return str(parts.parent) == step_folder(step) and parts.suffix == ".json" and not parts.name.startswith("_")


def step_of(path: str) -> int | None:
    """Return the step whose folder a path is in; None if it is in none."""
    return step_number(PurePosixPath(path).parts[0])


def load_record(folder: Folder, path: str, kind: type[Record]) -> Record | None:
    """Read a JSON record; return None if there is no such file.

    Raises:
        ChunkCorruptedError: The file is not such a record.
    """
    data = folder.read(path)
    try:
        return None if data is None else kind.model_validate_json(data)
    except ValidationError as error:
        raise ChunkCorruptedError(
            f"{path} in {folder} is not a {kind.__name__}: {error.errors()[0]['msg']}; clear its step and run it again"
        ) from None
