"""Open the monitors that a config lists."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from infra.monitors.delivery import Delivery, Log, Sink
from infra.monitors.files import JsonlSink, TensorBoardSink
from infra.monitors.mlflow import MlflowSink
from infra.monitors.prometheus import PrometheusSeries
from infra.monitors.rows import Row, evaluation_row, recorded_rows, step_row
from infra.monitors.trackio import TrackioSink
from infra.monitors.wandb import WandbSink, require_login
from infra.storage.places import is_url
from infra.storage.run_files import MetricsFile
from infra.storage.runs import RunDirectory
from rl_core.registry import Registry, entry
from schemas.config.kinds import kind_of
from schemas.config.monitor import (
    JsonlMonitor,
    MlflowMonitor,
    MonitorConfig,
    TensorBoardMonitor,
    TrackioMonitor,
    WandbMonitor,
)
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.step import EvalReport, StepReport

CLOSE_SECONDS = 300  # that all monitors together may take at the end of a run, whose workers have ended by then
STOP_SECONDS = 5  # and if it is cancelled or fails


class Monitors:
    """The monitors of a run."""

    def __init__(self, run_id: str, deliveries: list[Delivery]) -> None:
        self._deliveries, self._series = deliveries, PrometheusSeries(run_id)

    def log_recorded(self, metrics: MetricsFile) -> None:
        """Send the finished steps and the evaluations of a resumed run to the monitors that lack them."""
        if self._deliveries:
            for row in recorded_rows(metrics):
                self._deliver(row)

    def log_step(self, report: StepReport) -> None:
        """Send a finished step to all monitors, and set its Prometheus series."""
        self._log(step_row(report))

    def log_evaluation(self, report: EvalReport) -> None:
        """Send an evaluation to all monitors, and set its Prometheus series."""
        self._log(evaluation_row(report))

    def close(self, succeeded: bool) -> None:
        """Wait until all monitors have delivered everything, or for `CLOSE_SECONDS` or `STOP_SECONDS`."""
        self._series.close()
        for delivery in self._deliveries:
            delivery.end(succeeded)
        deadline = time.monotonic() + (CLOSE_SECONDS if succeeded else STOP_SECONDS)
        for delivery in self._deliveries:
            delivery.join(deadline)

    def _log(self, row: Row) -> None:
        self._series.show(row)
        self._deliver(row)

    def _deliver(self, row: Row) -> None:
        for delivery in self._deliveries:
            delivery.put(row)


@asynccontextmanager
async def open_monitors(directory: RunDirectory, config: RunConfig, log: Log) -> AsyncIterator[Monitors]:
    """Open the run's monitors, in the background; other runs of this process go on while they are closed.

    Args:
        directory: The run's directory.
        config: The run's configuration.
        log: Where a monitor's first error is reported.
    """
    recorded = partial(recorded_rows, directory.metrics)
    deliveries = [
        Delivery(kind_of(type(monitor)), partial(OPENERS, monitor, directory, config), recorded, log)
        for monitor in config.monitors
    ]
    monitors, succeeded = Monitors(directory.run_id, deliveries), False
    try:
        yield monitors
        succeeded = True
    finally:
        await asyncio.to_thread(monitors.close, succeeded)


def require_monitors(config: RunConfig) -> None:
    """Check that the config's monitors have what they need: a package, a local folder, an API key.

    Raises:
        ConfigError: One of these is missing.
    """
    for number, monitor in enumerate(config.monitors):
        if monitor.package is not None and find_spec(monitor.package) is None:
            kind = kind_of(type(monitor))
            raise ConfigError(
                f"monitors.{number}.kind = {kind!r}, but {monitor.package} is not installed; "
                f"pip install 'sluice-rl[{kind}]'"
            )
        needs_folder = is_url(config.runtime.runs_dir)
        if needs_folder and isinstance(monitor, TensorBoardMonitor | WandbMonitor) and not monitor.folder:
            raise ConfigError(
                f"monitors.{number} writes local files, but the run directory is in {config.runtime.runs_dir}; set "
                f"monitors.{number}.folder to a local one"
            )
        is_set_later = "WANDB_API_KEY" in config.services.secrets
        if isinstance(monitor, WandbMonitor) and not is_set_later:
            require_login(monitor)


def _open_jsonl(monitor: JsonlMonitor, directory: RunDirectory, config: RunConfig) -> Sink:
    return JsonlSink(Path(monitor.folder) / f"{directory.run_id}.jsonl")


def _open_tensorboard(monitor: TensorBoardMonitor, directory: RunDirectory, config: RunConfig) -> Sink:
    if monitor.folder:
        return TensorBoardSink(Path(monitor.folder) / directory.run_id)
    return TensorBoardSink(directory.path / "tensorboard")


def _open_wandb(monitor: WandbMonitor, directory: RunDirectory, config: RunConfig) -> Sink:
    folder = Path(monitor.folder) if monitor.folder else directory.path
    return WandbSink(monitor, folder, directory.run_id, config)


def _open_mlflow(monitor: MlflowMonitor, directory: RunDirectory, config: RunConfig) -> Sink:
    return MlflowSink(monitor, directory.run_id, config)


def _open_trackio(monitor: TrackioMonitor, directory: RunDirectory, config: RunConfig) -> Sink:
    return TrackioSink(monitor, directory.run_id, config)


OPENERS = Registry(
    "infra.monitors.open.OPENERS",
    MonitorConfig,
    entry(JsonlMonitor, _open_jsonl),
    entry(TensorBoardMonitor, _open_tensorboard),
    entry(WandbMonitor, _open_wandb),
    entry(MlflowMonitor, _open_mlflow),
    entry(TrackioMonitor, _open_trackio),
)
