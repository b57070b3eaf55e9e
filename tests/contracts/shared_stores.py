"""What the tests of the shared store have in common."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray

from infra.stores.shared.client import SharedColumnStore
from infra.stores.shared.index import find_shared_store, start_shared_store
from infra.stores.shared.node_files import Limits
from schemas.errors import WorkerLostError
from tests.contracts.backends import CAPACITY, NEVER_SECONDS

RUN = "shared-contract"
LIMITS = Limits(CAPACITY, NEVER_SECONDS, None)
SMALL, LARGE = [2, 0, 3], [2, 0, 400_000]


@contextmanager
def shared_store() -> Iterator[SharedColumnStore]:
    """Start a store whose step 1 is open; close it unless the test has done so."""
    made = start_shared_store(RUN, LIMITS)
    made.open(1)
    yield made
    with suppress(WorkerLostError):  # the test closed it
        find_shared_store(RUN).close()


def files(store: SharedColumnStore) -> list[str]:
    """Return the names of the chunk files on this node."""
    return sorted(path.name for path in Path(store._member.folder).glob("*.arrow"))


def index_process() -> psutil.Process:
    _, pid = ray.get(ray.get_actor(f"sluice/{RUN}/store", namespace="sluice").ping.remote())
    return psutil.Process(pid)


def has_no_index() -> bool:
    """Return whether Ray knows that the index is dead."""
    try:
        find_shared_store(RUN)
    except WorkerLostError as error:
        return "has no column store" in str(error)
    return False
