"""The column store's Prometheus metrics, which Ray's agent on each node exports."""

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from schemas.batch import StoreTraffic, StoreUsage


def record_traffic(run_id: str, stage: str, traffic: StoreTraffic) -> None:
    """Add a stage's traffic to this process's counters, if the process is connected to Ray."""
    ray = sys.modules.get("ray")  # a process that only reads files need not import it
    if ray is None or not ray.is_initialized() or traffic == StoreTraffic():
        return
    for name, value in traffic:
        if value:
            _counter(name).inc(value, tags={"run_id": run_id, "stage": stage})


def record_usage(run_id: str, usage: StoreUsage) -> None:
    """Set the gauges of the registry's process."""
    for name in ("num_chunks", "num_rows", "num_bytes", "peak_bytes", "capacity_bytes"):
        _gauge(name).set(getattr(usage, name), tags={"run_id": run_id})
    _gauge("open_steps").set(len(usage.open_steps), tags={"run_id": run_id})


class StoreSeries(NamedTuple):
    """One Prometheus series of the column store, to whose name Ray adds `ray_`, and `_total` to a counter's."""

    name: str
    meaning: str
    is_counter: bool


@cache
def _counter(name: str) -> Any:
    from ray.util.metrics import Counter

    return Counter(SERIES[name].name, SERIES[name].meaning, tag_keys=("run_id", "stage"))


@cache
def _gauge(name: str) -> Any:
    from ray.util.metrics import Gauge

    return Gauge(SERIES[name].name, SERIES[name].meaning, tag_keys=("run_id",))


def _series(meanings: Mapping[str, str], is_counter: bool) -> dict[str, StoreSeries]:
    return {name: StoreSeries(f"sluice_store_{name}", meaning, is_counter) for name, meaning in meanings.items()}


_COUNTERS = {
    "num_puts": "Number of chunks put.",
    "put_bytes": "Encoded bytes put.",
    "put_seconds": "Seconds spent in puts.",
    "num_reads": "Number of reads.",
    "read_bytes": "Bytes of the columns returned by reads.",
    "read_seconds": "Seconds spent in reads.",
}
_GAUGES = {
    "num_chunks": "Chunks of open steps.",
    "num_rows": "Rows of open steps.",
    "num_bytes": "Bytes of open steps.",
    "peak_bytes": "Peak of the bytes held.",
    "capacity_bytes": "Limit on the bytes held.",
    "open_steps": "Number of open steps: more than a step and those ahead of it are a leak.",
}
SERIES = _series(_COUNTERS, True) | _series(_GAUGES, False)
