"""The flows that deployments run. Their parameters are flat and described: the Prefect UI makes its forms from them.

Each fails with one line if its input is refused; the Prefect UI shows that line as the state's message.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import ParamSpec
from uuid import UUID

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.objects import ConcurrencyLeaseHolder, State
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError, concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, Running

from flows.configs import find_config
from flows.lifecycle.cancellation import cancellable, rename_flow_run, set_state
from flows.lifecycle.outages import API_ERRORS, call_through_outages
from flows.lifecycle.secrets import take_secrets
from flows.pipeline import run_stages
from flows.pipeline_plan import PipelinePlan, check_pipeline, load_pipeline, plan_pipeline, stored_plan
from flows.summary import finished_summary
from flows.train import own_run_id, train_policy
from flows.ui.artifacts import show_evaluation
from infra.ray.module_path import append_working_directory
from infra.storage.driver_lock import is_driven
from infra.storage.runs import RunDirectory
from infra.workers.inputs import data_digest
from schemas.config import DEFAULT_RUNS_DIR
from schemas.config.load import load_config
from schemas.config.pipeline import PipelineConfig
from schemas.config.run import RunConfig
from schemas.errors import PipelineError, RunError
from schemas.errors import describe as describe_error
from schemas.step import EvalReport
from tasks.assets import asset_at, describe, describe_evaluation, evaluated, evaluation_of, upstream
from tasks.stage import operation

P = ParamSpec("P")
SLOTS = 1  # of a new pool; a pool of several clusters' worth of GPUs may be given more in the Prefect UI
LEASE_SECONDS = 60  # after which the slot of a killed run is free again; the shortest that Prefect allows
POLL_SECONDS = 2.0  # between two looks whether another process still drives a run
CRASHES = 5  # in a row, without a finished step, after which nothing is changed by another attempt


def _one_line_failure(function: Callable[P, Awaitable[State]]) -> Callable[P, Awaitable[State]]:
    """Return `function` with its errors as a failed state, whose message says what and where in one line."""

    @wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> State:
        append_working_directory()  # a reward function may be next to the config
        try:
            return await function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  any error is the state's message, in one line
            message = "; ".join((describe_error(error), *getattr(error, "__notes__", ())))
            get_run_logger().error(message, exc_info=not isinstance(error, PipelineError))
            return Failed(message=message)

    return run


@flow(name="train", persist_result=False)
@_one_line_failure
async def train(config: str, overrides: tuple[str, ...] = (), run_id: str | None = None, note: str = "") -> State:
    """Start a GRPO run, or resume it: a retry of this flow run continues the same run exactly.

    Args:
        config: A TOML file, relative to the deployment's folder, or the name of a built-in config.
        overrides: Changes to the config, one `section.key=value` each, e.g. `optim.lr=1e-4`.
        run_id: The run's id. If a run of this id exists, it is resumed. Default: made from the config's name.
        note: Free text for people, e.g. why this run was started.
    """
    run_config = _run_config(config, overrides, run_id, note)
    run_id = run_id or own_run_id(run_config.name)
    patience = run_config.services.prefect_patience_seconds
    await call_through_outages(partial(rename_flow_run, run_id), patience)
    directory = RunDirectory.at(run_config, run_id)
    if (cancelled := await cancellable(_wait_for_other_driver(directory))) is not None:
        return cancelled
    if (finished := finished_summary(run_config, run_id)) is not None:
        return Completed(message=f"run {run_id} was complete already: {finished.steps} of {run_config.steps} steps")
    await call_through_outages(partial(_require_progress, [directory]), patience)
    from flows.preflight import check_start  # not at the top: torch is imported with it

    run_config = check_start(run_config, directory)
    return await cancellable(_train_in_turn(run_config, run_id))


@flow(name="pipeline", persist_result=False)
@_one_line_failure
async def pipeline(file: str, overrides: tuple[str, ...] = (), pipeline_id: str | None = None) -> State:
    """Run stages that start from each other's models, and promote the last model: a retry goes on where it was.

    Args:
        file: A TOML file with stages, relative to the deployment's folder.
        overrides: Changes to the file, one `section.key=value` each, e.g. `stages.grpo.set.optim.lr=1e-4`.
        pipeline_id: The pipeline's id. If it exists, it goes on. Default: made from the file's name.
    """
    config = load_pipeline(file, overrides)
    plan = _plan(config, own_run_id(config.name), pipeline_id)
    patience = plan.services.prefect_patience_seconds
    await call_through_outages(partial(rename_flow_run, plan.pipeline_id), patience)
    take_secrets(plan.services)
    if (cancelled := await cancellable(_wait_for_other_driver(RunDirectory(plan.folder)))) is not None:
        return cancelled
    directories = [run.directory for run in plan.all_runs]
    await call_through_outages(partial(_require_progress, directories), patience)
    check_pipeline(plan)
    return await cancellable(_promote_in_turn(plan))


@flow(name="evaluate", flow_run_name="evaluate-{run}", persist_result=False)
@_one_line_failure
async def evaluate(
    run: str,
    overrides: tuple[str, ...] = (),
    data_path: str | None = None,
    num_prompts: int | None = None,
    runs_dir: str = DEFAULT_RUNS_DIR,
) -> State:
    """Measure the held-out accuracy of a run's newest checkpoint.

    Args:
        run: The run's id or directory.
        overrides: Changes to the config for this evaluation, e.g. `eval.samples_per_prompt=8`.
        data_path: A prompt file. Default: the run's eval file.
        num_prompts: The maximum number of prompts. Default: the config's.
        runs_dir: The folder that holds the runs.
    """
    from flows.evaluate import evaluate_run  # not at the top: torch is imported with it

    directory = RunDirectory.open(run, runs_dir)
    config = directory.config()

    @operation("evaluate")
    def evaluate_checkpoint() -> EvalReport:
        report = evaluate_run(directory, data_path, num_prompts, overrides)
        describe_evaluation(directory, report)
        return report

    inputs = evaluated(directory, config, 1, data_path or config.data.eval_path)  # of any version, the checkpoint
    report = evaluate_checkpoint.materializing(evaluation_of(directory), inputs)()
    await show_evaluation(directory.run_id, report)
    return Completed(message=f"policy version {report.policy_version}: {report}")


@flow(name="export", flow_run_name="export-{run}", persist_result=False)
@_one_line_failure
async def export(
    run: str,
    out: str,
    step: int | None = None,
    best: bool = False,
    dtype: str | None = None,
    runs_dir: str = DEFAULT_RUNS_DIR,
) -> State:
    """Write a checkpoint of a run as a Hugging Face folder.

    Args:
        run: The run's id or directory.
        out: The folder to write, which must be empty or not exist.
        step: The checkpoint after this many steps. Default: the newest.
        best: Whether to export the checkpoint with the best held-out accuracy instead.
        dtype: float32, bfloat16 or float16. Default: the base model's.
        runs_dir: The folder that holds the runs.
    """
    from flows.export import export_as_asset  # not at the top: torch is imported with it

    version = await export_as_asset(RunDirectory.open(run, runs_dir), Path(out), version=step, best=best, dtype=dtype)
    return Completed(message=f"wrote policy version {version} to {out}")


@flow(name="prepare-data", flow_run_name="prepare-data-{task}", persist_result=False)
@_one_line_failure
async def prepare_data(
    task: str,
    out: str,
    settings: tuple[str, ...] = (),
    size: int = 1000,
    seed: int = 0,
    exclude: str | None = None,
) -> State:
    """Write problems of a reasoning-gym task to a file.

    Args:
        task: A reasoning-gym task, e.g. chain_sum.
        out: The file to write, `.parquet` or `.jsonl`.
        settings: The task's own settings, one `key=value` each, e.g. `min_terms=2`.
        size: The number of problems.
        seed: The task's seed.
        exclude: A file whose problems are skipped.
    """
    from infra.datasets.reasoning_gym import parse_settings, write_problems  # not at the top: needs an extra

    asset = asset_at(out)

    @operation("prepare-data")
    def write() -> int:
        num_rows = write_problems(
            Path(out),
            task,
            size=size,
            seed=seed,
            settings=parse_settings(settings),
            exclude=Path(exclude) if exclude else None,
        )
        found = {"task": task, "rows": num_rows, "bytes": Path(out).stat().st_size, "digest": data_digest(out)}
        describe(asset, found)
        return num_rows

    num_rows = write.materializing(asset, upstream([exclude] if exclude else []))()
    return Completed(message=f"wrote {num_rows} rows of {task} to {out}")


async def _promote_in_turn(plan: PipelinePlan) -> State:
    """Run a pipeline, each of whose runs waits for a free slot of its pool."""
    patience = plan.services.prefect_patience_seconds
    result = await call_through_outages(partial(run_stages, plan, hold_pool), patience)
    return Completed(message=f"promoted {result.model}")


async def _train_in_turn(config: RunConfig, run_id: str) -> State:
    """Train once the pool has a free slot."""
    async with hold_pool(config):
        summary = await call_through_outages(
            partial(train_policy, config, run_id),
            config.services.prefect_patience_seconds,
            partial(finished_summary, config, run_id),
        )
    name = "loss" if summary.reward_first is None else "reward"
    first, last = getattr(summary, f"{name}_first"), getattr(summary, f"{name}_last")
    return Completed(message=f"{summary.steps} steps, {name} {first:.3f} to {last:.3f}")


async def _wait_for_other_driver(directory: RunDirectory) -> None:
    """Wait while another process drives a run or a pipeline.

    It may be this flow run's own, which Prefect has lost sight of: an error would end the flow run of a living run.
    """
    if await asyncio.to_thread(is_driven, directory):
        get_run_logger().info("another process drives %s; waiting for its end", directory.url)
    while await asyncio.to_thread(is_driven, directory):
        await asyncio.sleep(POLL_SECONDS)


async def _require_progress(runs: Sequence[RunDirectory]) -> None:
    """Check that the flow run has not crashed again and again without a finished step; a retry of a failed one may."""
    steps = [run.metrics.last_step() for run in runs if run.exists]
    since, crashes = max((step.started_at or 0.0 for step in steps if step), default=0.0), 0
    async with get_client() as client:
        states = await client.read_flow_run_states(UUID(flow_run.id))
    for state in sorted(states, key=lambda state: state.timestamp):
        if state.is_failed():
            crashes = 0
        elif state.is_crashed() and state.timestamp.timestamp() > since:
            crashes += 1
    if crashes >= CRASHES:
        raise RunError(
            f"crashed {crashes} times without finishing a step: its processes were killed, or ended by themselves; see "
            "the log of its worker and the memory of its machine, and retry it"
        )


def _plan(config: PipelineConfig, own_id: str, pipeline_id: str | None) -> PipelinePlan:
    """Plan a pipeline; a retry trains what its first attempt began, even if the file has changed, but asks its gate."""
    if pipeline_id is None and (stored := stored_plan(config, own_id)) is not None:
        return stored.replace(config=stored.config.replace(gate=config.gate))
    return plan_pipeline(config, pipeline_id or own_id)


def _run_config(config: str, overrides: Sequence[str], run_id: str | None, note: str) -> RunConfig:
    """Load the config; a retry continues with the one that its run started with, even if the file has changed."""
    loaded = load_config(find_config(config), overrides)
    take_secrets(loaded.services)  # at each attempt, and before the run's directory, which may need them, is opened
    if run_id is None and (own := RunDirectory.at(loaded, own_run_id(loaded.name))).exists:
        stored = own.config()
        take_secrets(stored.services)
        return stored
    return loaded.replace(note=note) if note else loaded


def limit_name(pool: str) -> str:
    """Return the name of a pool's concurrency limit."""
    return f"sluice-{pool}"


@asynccontextmanager
async def hold_pool(config: RunConfig, *, shows_queue: bool = True) -> AsyncIterator[None]:
    """Hold a slot of the run's pool during the block; until one is free, `shows_queue` has the flow run be `Queued`.

    The slot is waited for through outages of the Prefect server. During the block and at its end they change nothing:
    a lease that is lost, or isn't given back, ends by itself.

    Raises:
        ServerLostError: Before the block, the server did not respond again in time.
    """
    name, patience = limit_name(config.runtime.pool), config.services.prefect_patience_seconds
    is_full = await call_through_outages(partial(_is_full, name), patience)
    if is_full:
        message = f"waiting for a slot of the pool {config.runtime.pool!r}, which another run holds"
        get_run_logger().info("%s; prefect gcl update %s --limit N gives the pool more", message, name)
        if shows_queue:
            await call_through_outages(lambda: set_state(Running(name="Queued", message=message)), patience)
    slot = await call_through_outages(partial(_take_slot, name), patience)
    try:
        if is_full and shows_queue:
            await call_through_outages(lambda: set_state(Running()), patience)
        yield
    finally:
        try:
            await slot.aclose()
        except API_ERRORS as error:
            message = "the slot of the pool %r was not given back (%s); it is free again in %d s"
            get_run_logger().warning(message, config.runtime.pool, describe_error(error), LEASE_SECONDS)


async def _take_slot(name: str) -> AsyncExitStack:
    """Wait for a slot of the limit; closing what is returned gives it back."""
    holder, slot = ConcurrencyLeaseHolder(type="flow_run", id=flow_run.id), AsyncExitStack()
    try:
        await slot.enter_async_context(
            concurrency(
                name, strict=True, lease_duration=LEASE_SECONDS, holder=holder, raise_on_lease_renewal_failure=False
            )
        )
    except ConcurrencySlotAcquisitionError as error:  # of any error of the request
        failed = error.__cause__ or error
    else:
        return slot
    raise failed  # outside of its handler, or each error would be the other one's cause


async def _is_full(name: str) -> bool:
    """Return whether all slots are taken; create the limit if it doesn't exist."""
    async with get_client() as client:
        try:
            limit = await client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            with suppress(ObjectAlreadyExists):  # another run has just created it
                await client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=SLOTS))
            limit = await client.read_global_concurrency_limit_by_name(name)
    return limit.active_slots >= limit.limit
