"""Every test in this folder that uses `store` or `backend` runs once per backend."""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from infra.stores.base import ColumnStore
from schemas.errors import StoreError
from tests.contracts.backends import Backend
from tests.support.s3 import s3_server

KINDS = [
    "memory",
    "file",
    "fsspec-memory",
    "tiered-memory",
    pytest.param("s3", marks=pytest.mark.slow),
    pytest.param("shared", marks=pytest.mark.slow),
    pytest.param("tiered", marks=pytest.mark.slow),
]
_steps = itertools.count(1)


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """Serve an empty S3 bucket; return the options with which fsspec reaches it."""
    with s3_server("columns") as options:
        yield options


@pytest.fixture(scope="module", params=KINDS)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """Return a maker of empty stores of one kind."""
    if request.param in ("shared", "tiered"):
        request.getfixturevalue("ray_cluster")
    options = request.getfixturevalue("s3_options") if request.param == "s3" else None
    made = Backend(request.param, tmp_path_factory.mktemp("columns"), options)
    yield made
    made.close()


@pytest.fixture(scope="module")
def store(backend: Backend) -> ColumnStore:
    """Return one store for all tests of a module."""
    return backend.make()


@pytest.fixture
def step(store: ColumnStore) -> Iterator[int]:
    """Return a step that no other test uses, which is open; clear it afterwards."""
    number = next(_steps)
    store.open(number)
    yield number
    with suppress(StoreError):  # a test may have cleared the step under a write
        store.flush()
    store.clear(number)
