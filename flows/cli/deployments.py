"""`sluice serve` and `sluice deploy`: runs that are started from the Prefect UI, on a schedule or by an automation."""

import asyncio
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import WorkPool
from prefect.exceptions import ObjectNotFound
from prefect.runner import Runner
from prefect.schedules import Schedule
from rich.console import Console

from flows.deployments import entrypoints
from flows.deployments.automations import Automations, find_block
from flows.deployments.register import COMMON, Offer, config_offers, load_configs, other_offers, parse_schedule
from flows.lifecycle.secrets import take_secrets
from flows.lifecycle.session import prefect_session
from flows.pipeline_plan import PipelinePlan, check_pipeline, is_pipeline
from schemas.config.runtime import ServicesConfig
from schemas.errors import ConfigError, ServiceError

# The working directory must not come first on the module path, where a user's own modules would shadow Sluice's.
RUN_ENVIRONMENT = {"PYTHONSAFEPATH": "1"}
HEARTBEAT_SECONDS = 30  # of the runs in a work pool, so that a lost machine is noticed
IMAGE_POOLS = ("docker", "kubernetes")  # the types of work pools that run containers


class Request(NamedTuple):
    """What is to be deployed."""

    configs: Sequence[str]  # the config files or built-in configs
    overrides: Sequence[str]  # changes to all of them
    cron: str | None  # when a run of each is started; None: on request only
    timezone: str  # the schedule's time zone
    overlap: bool  # whether a run of a config is started while one runs


class Reactions(NamedTuple):
    """The automations of the deployment of a config; crashed runs are always resumed, collapsed ones suspended."""

    notify: str | None  # a notification block, TYPE/NAME, for stalled and failed runs; None: no notification
    stalled_minutes: float  # minutes without a finished step after which a run is stalled
    evaluate: bool  # whether the newest checkpoint is evaluated after each one
    export_to: str | None  # the folder under which each checkpoint is exported that is kept until then; None: none is


def serve(console: Console, request: Request, limit: int) -> None:
    """Create deployments of the configs, and run in this process, until it is stopped, what Prefect starts of them.

    Args:
        console: The terminal.
        request: What is to be deployed.
        limit: The number of flow runs at the same time; runs of one GPU pool take turns anyway.

    Raises:
        UserError: A config, the schedule or a service is refused; nothing was started.
    """
    schedule, (services, *_) = _check(console, request)
    os.environ.update(RUN_ENVIRONMENT)
    with prefect_session(services, console):
        offers = config_offers(request.configs, request.overrides, schedule, overlap=request.overlap)
        asyncio.run(_serve(console, [*offers, *other_offers(COMMON)], limit))


async def _serve(console: Console, offers: Sequence[Offer], limit: int) -> None:
    await _require_own(offers, {})
    runner = Runner(limit=limit)
    for offer in offers:
        await runner.aadd_flow(offer.flow, **offer.arguments())
        console.print(f"deployment {offer}", highlight=False)
    console.print("serving until stopped (Ctrl-C)")
    await runner.start()


def deploy(console: Console, request: Request, work_pool: str, image: str | None, reactions: Reactions) -> None:
    """Create deployments of the configs, with automations, whose runs the workers of a work pool start.

    Args:
        console: The terminal.
        request: What is to be deployed.
        work_pool: The work pool, which must exist.
        image: The image, for a docker or kubernetes work pool.
        reactions: The automations.

    Raises:
        UserError: A config, the schedule, the work pool or a block is refused; nothing was created.
    """
    schedule, services = _check(console, request, evaluates=reactions.evaluate)
    pipelines = [name for name in request.configs if is_pipeline(name)]
    if pipelines and (reactions.notify or reactions.evaluate or reactions.export_to):
        raise ConfigError(
            f"--notify, --evaluate and --export-to are for runs, and {pipelines[0]} is a pipeline; leave them out, or "
            "deploy it on its own"
        )
    with prefect_session(services[0], console):
        asyncio.run(_deploy(console, request, schedule, services, work_pool, image, reactions))
        console.print(f"start a worker, if none runs: prefect worker start --pool {work_pool}", highlight=False)


async def _deploy(
    console: Console,
    request: Request,
    schedule: Schedule | None,
    services: Sequence[ServicesConfig],
    work_pool: str,
    image: str | None,
    reactions: Reactions,
) -> None:
    async with get_client() as client:
        settings = _settings(await _find_pool(client, work_pool), image)
        block = await find_block(client, reactions.notify) if reactions.notify else None
    offers = config_offers(request.configs, request.overrides, schedule, overlap=request.overlap)
    await _require_own(offers, settings)
    others = {offer.flow.name: await _apply(console, offer, settings) for offer in other_offers(work_pool)}
    for offer, own in zip(offers, services, strict=True):
        automations = Automations(offer.full_name, await _apply(console, offer, settings), settings["job_variables"])
        await automations.resume_when_crashed()
        await automations.crash_when_silent(HEARTBEAT_SECONDS, own.prefect_patience_seconds)
        if offer.flow is not entrypoints.pipeline:  # whose runs are no flow runs of the deployment
            await _automate(automations, reactions, block, others)


async def _require_own(offers: Sequence[Offer], settings: Mapping[str, Any]) -> None:
    """Check that no deployment of another work pool or folder would be replaced, with its schedule."""
    own = settings.get("work_pool_name"), settings.get("job_variables", {}).get("working_dir")
    async with get_client() as client:
        for offer in offers:
            with suppress(ObjectNotFound):
                found = await client.read_deployment_by_name(offer.full_name)
                theirs = found.work_pool_name, found.job_variables.get("working_dir")
                if theirs != own:
                    raise ConfigError(
                        f"the Prefect server has a deployment {offer.full_name} of the work pool {theirs[0]}, folder "
                        f"{theirs[1]}, which would be replaced, with its schedule; rename the file, or delete that "
                        f"one: prefect deployment delete {offer.full_name}"
                    )


async def _apply(console: Console, offer: Offer, settings: Mapping[str, Any]) -> UUID:
    deployment = await offer.flow.ato_deployment(**offer.arguments(), **settings)
    console.print(f"deployment {offer}", highlight=False)
    return await deployment.aapply()


async def _automate(
    automations: Automations, reactions: Reactions, block: UUID | None, others: Mapping[str, UUID]
) -> None:
    await automations.suspend_on_collapse()
    if block is not None:
        await automations.notify_when_stalled(reactions.stalled_minutes, block)
        await automations.notify_when_failed(block)
    if reactions.evaluate:
        await automations.run_on_checkpoint("evaluate", others["evaluate"], {})
    if reactions.export_to is not None:
        step = "{{ event.payload.step }}"
        out = f"{reactions.export_to}/{{{{ event.payload.run_id }}}}-{step}"
        await automations.run_on_checkpoint("export", others["export"], {"out": out, "step": step})


async def _find_pool(client: PrefectClient, name: str) -> WorkPool:
    """Return a work pool that the server has."""
    try:
        return await client.read_work_pool(name)
    except ObjectNotFound:
        pools = ", ".join(sorted(pool.name for pool in await client.read_work_pools())) or "none"
        raise ServiceError(
            f"the Prefect server has no work pool {name!r} (it has: {pools}); create it with: "
            f"prefect work-pool create {name} --type process"
        ) from None


def _settings(pool: WorkPool, image: str | None) -> dict[str, Any]:
    """Return the settings of deployments in a work pool."""
    environment = RUN_ENVIRONMENT | {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)}
    if (pool.type in IMAGE_POOLS) != (image is not None):
        problem = "needs" if image is None else "takes no"
        raise ConfigError(f"the work pool {pool.name!r} of type {pool.type} {problem} --image")
    command = [sys.executable, "-P", "-m", "flows.deployments.execute"]
    local = {"working_dir": os.getcwd(), "command": shlex.join(command)}
    place = {"image": image} if image is not None else local if pool.type == "process" else {}
    return {"work_pool_name": pool.name, "job_variables": {"env": environment, **place}}


def _check(
    console: Console, request: Request, *, evaluates: bool = False
) -> tuple[Schedule | None, list[ServicesConfig]]:
    """Check schedule and configs; return the schedule, and the services of each config."""
    schedule = parse_schedule(request.cron, request.timezone)
    configs = load_configs(request.configs, request.overrides)
    from flows.preflight import check  # not at the top: torch is imported with it

    for name, config in configs.items():
        take_secrets(config.services, starts=True)
        with console.status(f"checking {name}: model, data and reward"):
            if isinstance(config, PipelinePlan):
                check_pipeline(config)
                continue
            if evaluates and config.data.eval_path is None:
                raise ConfigError(f"--evaluate: {name} has no data.eval_path; set it, or leave --evaluate out")
            check(config)
    return schedule, [config.services for config in configs.values()]
