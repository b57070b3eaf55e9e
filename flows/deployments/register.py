"""The deployments of configs: one of `train` or `pipeline` for each, and one each of the other flows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from prefect import Flow
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.schedules import Cron, Schedule
from prefect.types.entrypoint import EntrypointType

from flows.configs import find_config
from flows.deployments import entrypoints
from flows.pipeline_plan import PipelinePlan, is_pipeline, load_pipeline, plan_pipeline
from infra.storage.runs import new_run_id
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.errors import ConfigError

TAG = "sluice"
COMMON = "sluice"  # the name of the deployments of `sluice serve` that are not of one config


class Offer(NamedTuple):
    """A deployment to be created."""

    flow: Flow[..., Any]  # the flow
    name: str  # the deployment's name
    settings: Mapping[str, Any]  # further arguments of `Flow.to_deployment` or `Runner.add_flow`

    def arguments(self) -> dict[str, Any]:
        """Return all arguments but the flow."""
        return {"name": self.name, "tags": [TAG], "entrypoint_type": EntrypointType.MODULE_PATH, **self.settings}

    @property
    def full_name(self) -> str:
        """The name by which the Prefect server knows it."""
        return f"{self.flow.name}/{self.name}"

    def __str__(self) -> str:
        schedule = self.settings.get("schedule")
        return f"{self.full_name}{f', cron {schedule.cron!r}' if schedule else ''}"


def parse_schedule(cron: str | None, timezone: str) -> Schedule | None:
    """Return the schedule of a cron expression.

    Raises:
        ConfigError: The expression or the time zone can't be parsed.
    """
    if cron is None:
        return None
    try:
        ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError):
        raise ConfigError(f"--timezone {timezone!r} is not a time zone; give one like UTC or Europe/Berlin") from None
    try:
        return Cron(cron, timezone=timezone)
    except ValueError:
        raise ConfigError(
            f"--cron {cron!r} can't be parsed; give minute, hour, day, month and weekday, e.g. '0 2 * * *' for every "
            "night at two"
        ) from None


def load_configs(names: Sequence[str], overrides: Sequence[str]) -> dict[str, RunConfig | PipelinePlan]:
    """Load configs and pipelines by their deployments' names, which are those of their files.

    Raises:
        ConfigError: One is refused, or two have the same name.
    """
    configs: dict[str, RunConfig | PipelinePlan] = {}
    for name in names:
        deployment = Path(name).stem
        if deployment in configs:
            raise ConfigError(
                f"two configs are named {deployment!r}; rename one: a deployment has the name of its file"
            )
        if is_pipeline(name):
            pipeline = load_pipeline(name, overrides)
            configs[deployment] = plan_pipeline(pipeline, new_run_id(pipeline.name))
        else:
            configs[deployment] = load_config(find_config(name), overrides)
    return configs


def config_offers(
    configs: Sequence[str], overrides: Sequence[str], schedule: Schedule | None, *, overlap: bool
) -> list[Offer]:
    """Return an offer of `train` for each config and one of `pipeline` for each pipeline, with its file's name.

    Args:
        configs: The files or built-in configs.
        overrides: Changes to all of them.
        schedule: When a run of each is started; None: on request only.
        overlap: Whether another one is started while one runs; it then waits for a slot of its pool.
    """
    offers = []
    limit = None if overlap else ConcurrencyLimitConfig(limit=1, collision_strategy="CANCEL_NEW")
    for config in configs:
        flow, key = (entrypoints.pipeline, "file") if is_pipeline(config) else (entrypoints.train, "config")
        parameters = {key: config, "overrides": list(overrides)}
        settings = {"parameters": parameters, "schedule": schedule, "concurrency_limit": limit}
        offers.append(Offer(flow, Path(config).stem, settings))
    return offers


_OTHERS = (entrypoints.evaluate, entrypoints.export, entrypoints.prepare_data)
# One run of each at a time, and no process for those that wait: a run may save a checkpoint after each step.
_ONE_AT_A_TIME = {"concurrency_limit": ConcurrencyLimitConfig(limit=1, collision_strategy="ENQUEUE")}


def other_offers(name: str) -> list[Offer]:
    """Return an offer of each of the other flows, all of one name."""
    return [Offer(flow, name, _ONE_AT_A_TIME) for flow in _OTHERS]
