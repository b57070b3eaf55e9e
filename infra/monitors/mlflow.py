"""The MLflow sink."""

import time

from infra.monitors.rows import Position, Row
from schemas.config.differences import flat_values
from schemas.config.monitor import MlflowMonitor
from schemas.config.run import RunConfig

TAG = "sluice.run_id"
MAX_PARAM_CHARACTERS = 6000  # MLflow's limit


class MlflowSink:
    """A `Sink` that writes to the MLflow run with the tag `sluice.run_id`, which it creates if there is none.

    Args:
        monitor: Where the run is.
        run_id: The run's id.
        config: The run's configuration, logged as parameters of a new MLflow run.
    """

    def __init__(self, monitor: MlflowMonitor, run_id: str, config: RunConfig) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=monitor.tracking_uri)
        found = self._client.get_experiment_by_name(monitor.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(monitor.experiment)
        runs = self._client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{run_id}'")
        if runs:
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._client.create_run(experiment, tags={TAG: run_id}, run_name=run_id).info.run_id
            self._log_params(config)

    def position(self) -> Position:
        """Return the run's last step and evaluation, which MLflow has got last of their row."""
        held = self._client.get_run(self._run).data.metrics
        return Position(int(held.get("step", -1)), int(held.get("eval/step", -1)))

    def log(self, row: Row) -> None:
        """Write the row's metrics in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_key(name), value, now, row.step) for name, value in row.values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, succeeded: bool) -> None:
        """Set the run's status."""
        self._client.set_terminated(self._run, "FINISHED" if succeeded else "FAILED")

    def _log_params(self, config: RunConfig) -> None:
        from mlflow.entities import Param

        values = {key: value for key, value in flat_values(config).items() if value != {}}
        params = [Param(key, str(value)[:MAX_PARAM_CHARACTERS]) for key, value in values.items()]
        for first in range(0, len(params), 100):  # MLflow's limit per request
            self._client.log_batch(self._run, params=params[first : first + 100])


def _key(name: str) -> str:
    """Return a metric's name with only the characters that MLflow allows."""
    return "".join(each if each.isalnum() or each in "_-. :/" else "_" for each in name)
