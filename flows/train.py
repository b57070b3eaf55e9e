"""A whole GRPO run: evaluate, step until done, recover from dead workers, summarise."""

from contextlib import suppress
from statistics import fmean

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from flows.artifacts import create_progress, show_evaluation, update_progress
from flows.connection import connect
from flows.progress import eval_lines, progress_line, progress_table
from flows.recovery import open_run, reconcile
from flows.step import run_step
from infra.monitors.tensorboard import TensorBoardMonitor
from infra.storage.config_changes import change_config
from infra.storage.driver_lock import driver_lock
from infra.storage.metrics_file import MetricsFile
from infra.storage.runs import RunDirectory, new_run_id
from infra.stores.open import open_store, start_store
from infra.workers.launch import check_resources, kill_workers
from schemas.config.run import RunConfig
from schemas.errors import ChunkCorruptedError, ChunkNotFoundError, PipelineError, VersionError, WorkerLostError
from schemas.step import PolicyHandle, RunHandle, RunSummary
from tasks.checkpoint import save_checkpoint, save_on_failure
from tasks.evaluate import evaluate_policy
from tasks.workers import start_all_workers

SUMMARY_STEPS = 10


def _flow_run_name() -> str:
    return flow_run.parameters.get("run_id") or flow_run.parameters["config"].name


@flow(name="train", flow_run_name=_flow_run_name, persist_result=False)
async def train(config: RunConfig, run_id: str | None = None, resume: bool = False) -> RunSummary:
    """Run GRPO from the start, or go on with a run that stopped.

    Args:
        config: The run's configuration. That of a resumed run may differ from what it began with in where and how
            long it trains.
        run_id: The run's name; None makes one.
        resume: Whether the run exists already.

    Raises:
        ServiceError: No Ray answers.
        ConfigError: The Ray cluster has too few cores or GPUs.
        RunError: The run exists though `resume` is false, or does not though it is true, or trained something else.
        PipelineError: What stopped the run; `resume` goes on from there.
    """
    run_id = run_id or new_run_id(config.name)
    connect(config.runtime)
    check_resources(config)
    runs_dir = config.runtime.runs_dir
    directory = RunDirectory.open(run_id, runs_dir) if resume else RunDirectory.create(config, run_id)
    with driver_lock(directory):
        before = directory.config()
        if change_config(directory, config):
            kill_workers(run_id, before)  # they would go on with what they were started with
        run = open_run(directory, config)
        try:
            run = await _training_loop(run, directory)
            summary = _summarize(directory, open_store(run).usage().num_bytes)
            directory.write_summary(summary)
            return summary
        finally:
            kill_workers(run.run_id, config)
            start_store(directory, config)[0].close()


async def _training_loop(run: RunHandle, directory: RunDirectory) -> RunHandle:
    logger = get_run_logger()
    await start_all_workers(run)
    policy = await reconcile(run, directory)
    progress = await create_progress(run, 100 * policy.step / run.config.steps)
    tensorboard = TensorBoardMonitor(directory.path / "tensorboard") if run.config.runtime.tensorboard else None
    step_flow = run_step.with_options(result_storage=directory.ledger.path)
    restarts = 0
    try:
        while True:
            try:
                await _evaluate(run, policy, directory.metrics, tensorboard)
                if policy.step == run.config.steps:
                    await save_checkpoint(run, policy, wait=True)
                    return run
                report = await step_flow(run, policy)
                policy = policy.replace(version=report.policy_version)
                line = progress_line(report, run.config.steps)
                logger.info(line)
                description = f"{line}\n\n{progress_table(report)}"
                await update_progress(progress, 100 * policy.step / run.config.steps, description)
                if tensorboard:
                    tensorboard.log_step(report)
                if policy.step % run.config.checkpoint.every_steps == 0:
                    await save_checkpoint(run, policy)
            except (WorkerLostError, VersionError, ChunkNotFoundError, ChunkCorruptedError) as error:
                restarts += 1
                if restarts > run.config.runtime.max_restarts:
                    raise
                logger.warning("step %d is run again (%d): %s", policy.step, restarts, error)
                run = open_run(directory, run.config)
                await start_all_workers(run)
                policy = await reconcile(run, directory)
    except BaseException:
        with suppress(PipelineError):  # the run has failed already; this only keeps what can be kept
            await save_on_failure(run, policy)
        raise


async def _evaluate(
    run: RunHandle, policy: PolicyHandle, metrics: MetricsFile, tensorboard: TensorBoardMonitor | None
) -> None:
    every = run.config.eval.every_steps
    due = policy.step in (0, run.config.steps) or (every and policy.step % every == 0)
    if not run.config.data.eval_path or not due:
        return
    if any(report.policy_version == policy.version for report in metrics.evals()):
        return
    report = await evaluate_policy(run, policy)
    metrics.append_eval(report)
    await show_evaluation(run, report)
    if tensorboard:
        tensorboard.log_evaluation(report)
    first = f"held-out accuracy after {policy.step} steps: {report.accuracy:.3f} ({report.num_prompts} prompts)"
    for line in (first, *eval_lines(report)):
        get_run_logger().info(line)


def _summarize(directory: RunDirectory, store_bytes: int) -> RunSummary:
    steps, evals = directory.metrics.steps(), directory.metrics.evals()
    rewards = [report.metrics["reward"] for report in steps]
    accuracies = {report.policy_version: report.accuracy for report in evals}
    seconds = sum(report.seconds for report in steps)
    phases = {name for report in steps for name in report.seconds_by_phase}
    return RunSummary(
        run_id=directory.run_id,
        steps=len(steps),
        reward_first=fmean(rewards[:SUMMARY_STEPS]),
        reward_last=fmean(rewards[-SUMMARY_STEPS:]),
        accuracy_before=accuracies.get(0),
        accuracy_after=accuracies.get(len(steps)),
        seconds=seconds + sum(report.seconds for report in evals),
        tokens_per_second=sum(report.metrics["tokens"] for report in steps) / seconds,
        seconds_by_phase={
            name: sum(report.seconds_by_phase.get(name, 0.0) for report in steps) for name in sorted(phases)
        },
        store_bytes_at_end=store_bytes,
        prefect_ui=flow_run_url(),
    )


def flow_run_url() -> str:
    """The address of the current flow run in the Prefect UI; empty where the server has none."""
    return url_for("flow-run", flow_run.id) or ""
