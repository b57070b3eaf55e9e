"""The column store's figures as Prometheus metrics, which Ray's agent on each node serves."""

import sys
from functools import cache
from typing import Any

from schemas.store import StoreTraffic, StoreUsage


def count_traffic(run_id: str, stage: str, traffic: StoreTraffic) -> None:
    """Add what a stage moved to this process's counters."""
    ray = sys.modules.get("ray")  # a process that reads files has no need to import it
    if ray is None or not ray.is_initialized() or traffic == StoreTraffic():
        return
    for name, value in traffic:
        if value:
            _counter(name).inc(value, tags={"run_id": run_id, "stage": stage})


def show_usage(run_id: str, usage: StoreUsage) -> None:
    """Set the registry's gauges."""
    for name in ("num_chunks", "num_rows", "num_bytes", "peak_bytes", "capacity_bytes", "leaked_bytes"):
        _gauge(name).set(getattr(usage, name), tags={"run_id": run_id})
    _gauge("open_leases").set(len(usage.open_leases), tags={"run_id": run_id})


@cache
def _counter(name: str) -> Any:
    from ray.util.metrics import Counter

    return Counter(f"sluice_store_{name}", _DESCRIPTIONS[name], tag_keys=("run_id", "stage"))


@cache
def _gauge(name: str) -> Any:
    from ray.util.metrics import Gauge

    return Gauge(f"sluice_store_{name}", _DESCRIPTIONS[name], tag_keys=("run_id",))


_DESCRIPTIONS = {
    "num_puts": "Chunks put.",
    "put_bytes": "Encoded bytes put.",
    "put_seconds": "Seconds spent in puts.",
    "num_reads": "Reads.",
    "read_bytes": "Bytes of the columns that reads returned.",
    "read_seconds": "Seconds spent in reads.",
    "num_chunks": "Chunks held.",
    "num_rows": "Rows held.",
    "num_bytes": "Bytes held.",
    "peak_bytes": "The most bytes held at once.",
    "capacity_bytes": "The limit of the bytes held.",
    "leaked_bytes": "Bytes held under no open lease.",
    "open_leases": "Steps with an open lease.",
}
