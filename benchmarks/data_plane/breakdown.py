"""The breakdown of Sluice's put and read into timed parts.

The parts are functions of the store, patched with timers in the producer's and the consumer's process during a real
put or read. None runs within another; together with `rest`, they add up to its total. Renaming one of them in the store
raises an error here.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from infra.stores import base, chunk_reads
from infra.stores.shared import client
from infra.stores.shared.client import SharedColumnStore

Parts = dict[str, float]  # milliseconds

PUT_PARTS = {
    "validate": (base, "validate"),
    "requests": (SharedColumnStore, "_call"),
    "write": (SharedColumnStore, "_write"),
}
READ_PARTS = {
    "requests": (SharedColumnStore, "_call"),
    "mapping": (client, "map_chunk"),
    "decode": (chunk_reads, "decode"),
    "gather": (chunk_reads.Gather, "column"),
    "check_lengths": (base, "check_row_lengths"),
}


def put_breakdown(put: Callable[[], Any]) -> tuple[Parts, Any]:
    """Run a put; return the milliseconds of its parts, and its result."""
    with patch_timers(PUT_PARTS) as spent:
        total, result = _milliseconds(put)
    return _with_rest(total, spent, tuple(PUT_PARTS)), result


def read_breakdown(fetch: Callable[[], Any], pack: Callable[[Any], Any]) -> Parts:
    """Run a read to packed tensors; return the milliseconds of its parts."""
    with patch_timers(READ_PARTS) as spent:
        fetch_ms, fetched = _milliseconds(fetch)
    pack_ms, _ = _milliseconds(lambda: pack(fetched))
    return _with_rest(fetch_ms + pack_ms, {**spent, "pack": pack_ms}, (*READ_PARTS, "pack"))


@contextmanager
def patch_timers(parts: dict[str, tuple[Any, str]]) -> Iterator[Parts]:
    """Patch functions, given by owner and name; yield the total milliseconds spent in each."""
    spent = dict.fromkeys(parts, 0.0)
    with ExitStack() as stack:
        for part, (owner, name) in parts.items():
            stack.enter_context(patch.object(owner, name, _timer(getattr(owner, name), spent, part)))
        yield spent


def _timer(function: Callable[..., Any], spent: Parts, part: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        milliseconds, result = _milliseconds(lambda: function(*args, **kwargs))
        spent[part] += milliseconds
        return result

    return timed


def _milliseconds(operation: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = operation()
    return 1e3 * (time.perf_counter() - start), result


def _with_rest(total: float, spent: Parts, names: tuple[str, ...]) -> Parts:
    parts = {name: spent[name] for name in names}
    return {**parts, "rest": total - sum(parts.values()), "total": total}
