"""The MLflow sink."""

import time

from infra.monitors.rows import Position, Row
from schemas.base import digest_of
from schemas.config.load import flat_values
from schemas.config.monitor import MlflowMonitor
from schemas.config.run import RunConfig

TAG = "sluice.run_id"
MAX_PARAM_CHARACTERS, MAX_KEY_CHARACTERS = 6000, 250  # MLflow's limits


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
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(metric_key(name), value, now, row.step) for name, value in row.values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, succeeded: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if succeeded else "FAILED")

    def _log_params(self, config: RunConfig) -> None:
        from mlflow.entities import Param

        values = {key: value for key, value in flat_values(config).items() if value != {}}
        params = [Param(key, str(value)[:MAX_PARAM_CHARACTERS]) for key, value in values.items()]
        for first in range(0, len(params), 100):  # MLflow's limit per request
            self._client.log_batch(self._run, params=params[first : first + 100])


def metric_key(name: str) -> str:
    """Return the key of a metric: its name, cut and escaped as far as MLflow would refuse it.

    Different names have different keys, as MLflow would draw two metrics of one key as one.

    Example:
        >>> metric_key("eval/数学/reward"), metric_key("eval/a+b//c/reward")
        ('eval/数学/reward', 'eval/a_2b_b/_/c/reward')
    """
    parts = name.split("/")
    key = "/".join(
        "".join(map(_escaped, part)) if part.strip(".") else part.replace(".", "_2e_") or "_" for part in parts
    )
    if len(key) <= MAX_KEY_CHARACTERS:
        return key
    kept = (MAX_KEY_CHARACTERS - 18) // 2
    return f"{key[:kept]}_{digest_of(name)}_{key[-kept:]}"


def _escaped(character: str) -> str:
    return character if character.isalnum() or character in "_-. :" else f"_{ord(character):x}_"
