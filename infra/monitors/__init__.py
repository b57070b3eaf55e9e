"""Metric sinks outside the run directory's own files, behind one protocol.

The run's record for other tools is `metrics.jsonl` in the run directory, one JSON line per step and per evaluation
(`infra.storage.runs.MetricsFile`). It is always written, because resuming depends on it, so no monitor repeats it.
"""

from infra.monitors.base import Monitor
from infra.monitors.open import open_monitors, require_monitors

__all__ = ["Monitor", "open_monitors", "require_monitors"]
