"""A supervised warm start, as a flow."""

from prefect import flow, get_run_logger

from flows.lifecycle.ray_connection import connect
from infra.ray.actors import call, start_actor
from infra.workers.actor import actor_class
from schemas.config.runtime import ServicesConfig
from schemas.config.warmstart import WarmstartConfig
from tasks.stage import operation

REPORT_EVERY_STEPS = 25
WORKER = actor_class("infra.workers.warmstart:WarmstartWorker", "start", "advance", "save")


@flow(name="warm-start", flow_run_name="warm-start-{config.seed}", persist_result=False)
async def warm_start(config: WarmstartConfig, services: ServicesConfig) -> str:
    """Train a model on answers; returns the folder it was written to."""
    connect(services)
    return await train_on_answers(config)


@operation("supervised")
async def train_on_answers(config: WarmstartConfig) -> str:
    """Run the supervised steps in a Ray worker that ends with this task."""
    logger = get_run_logger()
    worker = start_actor(WORKER, config)
    await call(worker, "start")
    for done in range(0, config.steps, REPORT_EVERY_STEPS):
        num_steps = min(REPORT_EVERY_STEPS, config.steps - done)
        loss = await call(worker, "advance", num_steps)
        logger.info("warm start %3d/%d  loss %.3f nats per token", done + num_steps, config.steps, loss)
    return await call(worker, "save")
