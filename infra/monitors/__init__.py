"""A run's metrics for other tools: trackers and files, in any number, and Prometheus series.

The run's own record is `metrics.jsonl` in the run directory, one JSON line per step and per evaluation
(`infra.storage.run_files.MetricsFile`). It is always written, and resuming depends on it. A sink that lacks rows of
it gets them when it is opened.
"""

from infra.monitors.open import Monitors, open_monitors, require_monitors

__all__ = ["Monitors", "open_monitors", "require_monitors"]
