"""The train flow: evaluate, run all steps, recover from lost workers, summarize."""

from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from flows.artifacts import create_progress, show_evaluation, update_progress
from flows.connection import connect
from flows.progress import eval_lines, progress_line, progress_table
from flows.recovery import drop_outdated_ledger, open_run, reconcile
from flows.step import run_step
from flows.summary import summarize
from infra.monitors import Monitor, open_monitors
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


def _flow_run_name() -> str:
    return flow_run.parameters.get("run_id") or flow_run.parameters["config"].name


@flow(name="train", flow_run_name=_flow_run_name, persist_result=False)
async def train(config: RunConfig, run_id: str | None = None, resume: bool = False) -> RunSummary:
    """Run GRPO from the start, or resume a run that stopped.

    Args:
        config: The run's configuration. For a resumed run, it may change where and how long the run trains.
        run_id: The run's id; None derives one from the config's name.
        resume: Whether to resume an existing run.

    Raises:
        ServiceError: No Ray head responds.
        ConfigError: The Ray cluster has too few cores or GPUs.
        RunError: The run exists although `resume` is false, doesn't exist although it is true, trains something else
            than `config`, or was written by a newer Sluice.
        PipelineError: The run stopped; it can be resumed.
    """
    run_id = run_id or new_run_id(config.name)
    connect(config.runtime)
    check_resources(config)
    runs_dir = config.runtime.runs_dir
    directory = RunDirectory.open(run_id, runs_dir) if resume else RunDirectory.create(config, run_id)
    with driver_lock(directory):
        before = directory.config()
        if change_config(directory, config):
            kill_workers(run_id, before)  # they were started with the old config
        drop_outdated_ledger(directory, config)
        run = open_run(directory, config)
        try:
            run = await _training_loop(run, directory)
            summary = summarize(directory, open_store(run).usage().num_bytes)
            directory.write_summary(summary)
            return summary
        finally:
            kill_workers(run.run_id, config)
            start_store(directory, config)[0].close()


async def _training_loop(run: RunHandle, directory: RunDirectory) -> RunHandle:
    """Run all remaining steps; return the run's handle, since its column store may have been replaced."""
    logger, restarts = get_run_logger(), 0
    await start_all_workers(run)
    policy = await reconcile(run, directory)
    progress = await create_progress(run, 100 * policy.step / run.config.steps)
    step_flow = run_step.with_options(result_storage=directory.ledger.path)
    with ExitStack() as stack:
        monitors = [stack.enter_context(closing(monitor)) for monitor in open_monitors(directory, run.config)]
        try:
            while True:
                try:
                    await _evaluate(run, policy, directory.metrics, monitors)
                    if policy.step == run.config.steps:
                        await save_checkpoint(run, policy, wait=True)
                        return run
                    report = await step_flow(run, policy)
                    policy = policy.replace(version=report.policy_version)
                    line = progress_line(report, run.config.steps)
                    logger.info(line)
                    description = f"{line}\n\n{progress_table(report)}"
                    await update_progress(progress, 100 * policy.step / run.config.steps, description)
                    for monitor in monitors:
                        monitor.log_step(report)
                    if policy.step % run.config.checkpoint.every_steps == 0:
                        await save_checkpoint(run, policy)
                except (WorkerLostError, VersionError, ChunkNotFoundError, ChunkCorruptedError) as error:
                    restarts += 1
                    if restarts > run.config.runtime.max_restarts:
                        raise
                    logger.warning("running step %d again (restart %d): %s", policy.step, restarts, error)
                    run = open_run(directory, run.config)
                    await start_all_workers(run)
                    policy = await reconcile(run, directory)
        except BaseException:
            with suppress(PipelineError):  # the run has failed already; this only saves what can be saved
                await save_on_failure(run, policy)
            raise


async def _evaluate(run: RunHandle, policy: PolicyHandle, metrics: MetricsFile, monitors: Sequence[Monitor]) -> None:
    """Evaluate the policy's version if the config asks for it and it hasn't been evaluated yet."""
    every = run.config.eval.every_steps
    is_wanted = policy.step in (0, run.config.steps) or (every and policy.step % every == 0)
    if not run.config.data.eval_path or not is_wanted:
        return
    if any(report.policy_version == policy.version for report in metrics.evals()):
        return
    report = await evaluate_policy(run, policy)
    metrics.append_eval(report)
    await show_evaluation(run, report)
    for monitor in monitors:
        monitor.log_evaluation(report)
    first = f"held-out accuracy after {policy.step} steps: {report.accuracy:.3f} ({report.num_prompts} prompts)"
    for line in (first, *eval_lines(report)):
        get_run_logger().info(line)
