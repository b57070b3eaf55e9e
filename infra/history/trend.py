"""A run's metrics over its steps, and which steps are kept."""

from typing import Any

from infra.history.plain import plain
from infra.storage.run_list import run_state
from infra.storage.runs import RunDirectory
from infra.stores.run_columns import open_run_columns
from schemas.errors import MetricError, RunError
from schemas.metric_catalog import metric_spec


def read_trend(directory: RunDirectory) -> dict[str, Any]:
    """Return all metrics of a run's finished steps.

    Returns:
        `run_id`; `state`; `num_steps` of its config; `steps`, the finished ones; `metrics`: of each, by name, a value
        or null for each of `steps`; `kept`: the steps that have columns; `not_kept`: why there are none.

    Raises:
        RunError: Files of the run are of another version of Sluice.
    """
    config, reports = directory.config(), directory.metrics.steps()
    values = [{**report.metrics, **report.telemetry} for report in reports]
    names = dict.fromkeys(["reward", *(name for step in values for name in step)])
    kept, reason = _kept_steps(directory)
    return {
        "run_id": directory.run_id,
        "state": run_state(directory, config),
        "num_steps": config.steps,
        "steps": [report.step for report in reports],
        "metrics": {name: plain([step.get(name) for step in values]) for name in names if values},
        "kept": kept,
        "not_kept": reason,
    }


def _kept_steps(directory: RunDirectory) -> tuple[list[int], str | None]:
    try:
        return open_run_columns(directory).steps(), None
    except RunError as error:
        return [], str(error)


def metric_facts(name: str) -> dict[str, str]:
    """Return the unit and meaning of a metric, empty for one that the catalog doesn't have."""
    try:
        spec = metric_spec(name)
    except MetricError:
        return {"unit": "", "meaning": ""}
    return {"unit": spec.unit, "meaning": spec.meaning}
