"""The two actors of every measurement: a producer and a consumer, which each time only their own work."""

import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from benchmarks.data_plane.baselines import TransferQueue
from benchmarks.data_plane.batch import Ints, digests, pack_columns, reference_batch, valid_bytes
from benchmarks.data_plane.paths import DataPath, Memcpy, Sluice

Result = TypeVar("Result")

PATHS: dict[str, type[DataPath]] = {path.name: path for path in (Sluice, TransferQueue, Memcpy)}


class Producer:
    """The actor that holds the reference batch in every path's container, and puts it."""

    def __init__(self, names: Sequence[str], num_rows: int, repeats: int = 1) -> None:
        torch.set_num_threads(os.cpu_count() or 1)  # Ray limits an actor to one
        self._batch = reference_batch(num_rows, repeats)
        self._paths = {name: PATHS[name]() for name in names}
        for path in self._paths.values():
            path.prepare(self._batch)
        gc.freeze()

    def describe(self) -> dict[str, int]:
        """Return the batch's counts and bytes."""
        prompts, responses = int(self._batch.prompt_lengths.sum()), int(self._batch.response_lengths.sum())
        return {
            "rows": self._batch.columns.num_rows,
            "tokens": prompts + responses,
            "response_tokens": responses,
            "valid_bytes": valid_bytes(self._batch.columns),
        }

    def expected(self, order: Ints | None) -> dict[str, str]:
        """Return the checksums of the columns, with rows in `order`."""
        columns = self._batch.columns
        return digests(pack_columns(columns if order is None else columns.take(order)))

    def expected_appended(self) -> dict[str, str]:
        return digests(pack_columns(self._batch.appended))

    def num_bytes(self, name: str) -> int:
        """Return the bytes that the path stores for one batch; valid after its first put."""
        return self._paths[name].num_bytes

    def put(self, name: str, step: int) -> tuple[float, Any]:
        """Put the batch; return the milliseconds and the handle."""
        path = self._paths[name]
        path.open(step)
        return timed(lambda: path.put(step))

    def append(self, name: str, step: int, handle: Any) -> tuple[float, Any]:
        """Append a column; return the milliseconds and the handle that includes it."""
        path = self._paths[name]
        extendable = path.extendable(handle)
        return timed(lambda: path.append(step, extendable))

    def is_copied(self, name: str) -> bool:
        path = self._paths[name]
        assert isinstance(path, Memcpy), f"{name} has a consumer, which verifies it"
        return path.is_copied()

    def clear(self, name: str, step: int, handle: Any) -> None:
        self._paths[name].clear(step, handle)

    def close(self) -> None:
        for path in self._paths.values():
            path.close()


class Consumer:
    """The actor that reads what the producer put into packed tensors."""

    def __init__(self, names: Sequence[str]) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        self._paths = {name: PATHS[name]() for name in names}
        for path in self._paths.values():
            path.connect()
        gc.freeze()

    def read(self, name: str, handle: Any, order: Ints | None = None) -> tuple[float, float]:
        """Read the batch; return the milliseconds of the fetch and of the packing."""
        path = self._paths[name]
        fetch_ms, fetched = timed(lambda: path.fetch(handle, order))
        pack_ms, _ = timed(lambda: path.pack(fetched, order))
        return fetch_ms, pack_ms

    def digests(self, name: str, handle: Any, order: Ints | None) -> dict[str, str]:
        """Return the checksums of the columns as this process reads them."""
        path = self._paths[name]
        return digests(path.pack(path.fetch(handle, order), order))

    def digests_appended(self, name: str, handle: Any) -> dict[str, str]:
        return digests(self._paths[name].fetch_appended(handle))


def timed(operation: Callable[[], Result]) -> tuple[float, Result]:
    """Return the milliseconds that `operation` takes with garbage collection disabled, and its result."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        result = operation()
        return 1e3 * (time.perf_counter() - start), result
    finally:
        gc.enable()
