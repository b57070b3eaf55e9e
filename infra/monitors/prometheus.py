"""A run's metrics as Prometheus series, which Ray's agent on the driver's node exports."""

import logging
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from infra.monitors.rows import Row
from schemas.metric_catalog import MetricSpec, find_metric

REFRESH_SECONDS = 5
STORE_PREFIX = "store/"  # the store's own processes export these

logger = logging.getLogger(__name__)


class Label(str):
    """A label's value of any characters: Ray asks for its ASCII bytes, and passes on the UTF-8 ones that it gets."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "replace") -> bytes:
        """Return the bytes in UTF-8, whichever encoding is asked for."""
        return super().encode("utf-8", "replace")


class PrometheusSeries:
    """The series of one run, each with its value in the last step or the last evaluation.

    A series is named by `MetricSpec.series`, and labeled with the run's id and the part in which it differs from
    others of its family, such as `phase`. They need a process that is connected to Ray.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._values: dict[str, float] = {}  # by metric; replaced, never changed, as two threads read it
        self._is_closed = threading.Event()
        self._has_failed = False
        threading.Thread(target=self._refresh, name="prometheus", daemon=True).start()

    def show(self, row: Row) -> None:
        """Set the series of a row's metrics."""
        own = {name: value for name, value in row.values.items() if not name.startswith(STORE_PREFIX)}
        self._values = self._values | own
        self._set(own)

    def close(self) -> None:
        """Let the series end."""
        self._is_closed.set()

    def _refresh(self) -> None:
        """Set all values again and again: Ray's agent drops a series that is not set for a while."""
        while not self._is_closed.wait(REFRESH_SECONDS):
            self._set(self._values)

    def _set(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            try:
                spec, parts = find_metric(name)
                labels = {label: Label(part) for label, part in parts.items()}
                _gauge(spec, tuple(parts)).set(value, tags={"run_id": self._run_id, **labels})
            except Exception as error:  # noqa: BLE001  no run fails for a series that can't be exported
                if not self._has_failed:
                    logger.warning("metric %r has no Prometheus series: %s: %s", name, type(error).__name__, error)
                self._has_failed = True


@cache
def _gauge(spec: MetricSpec, parts: tuple[str, ...]) -> Any:
    from ray.util.metrics import Gauge

    unit = f" Unit: {spec.unit}." if spec.unit else ""
    return Gauge(spec.series, spec.meaning + unit, tag_keys=("run_id", *parts))
