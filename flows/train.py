"""The train flow: evaluate, run all steps, recover from lost workers, summarize."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import cast

from prefect import flow, get_run_logger
from prefect.context import SyncClientContext
from prefect.exceptions import TerminationSignal
from prefect.filesystems import RemoteFileSystem
from prefect.runtime import flow_run

from flows.lifecycle.cancellation import (
    Notice,
    cancellable,
    finish,
    run_in_thread,
    run_until,
    sigterm_only_told,
    terminable,
)
from flows.lifecycle.outages import call_through_outages
from flows.lifecycle.session import SETTLE_SECONDS, connect, while_ray_lives
from flows.recovery import change_config, drop_outdated_ledger, find_or_create_run, open_run, reconcile, record_event
from flows.step import new_step_flow
from flows.summary import finished_summary, summarize
from flows.ui.approval import ask_for_approval, find_failed_queries
from flows.ui.artifacts import ProgressArtifact, report_run, show_placement
from flows.ui.events import RunEvents
from flows.ui.progress import place_table, sharing_line
from flows.ui.reporter import RunReporter, logs_in_prefect, newest_steps_kept
from infra.monitors import Monitors, open_monitors
from infra.processes import infrequent_gc
from infra.ray.tracing import traced_run
from infra.storage.driver_lock import driver_lock, finish_in_thread, holds_lock, watch_lock
from infra.storage.driver_log import driver_log
from infra.storage.identity import claim_identity
from infra.storage.lineage import load_fork
from infra.storage.runs import RunDirectory
from infra.stores.open import close_store, open_store
from infra.workers.inputs import evaluation_digest, keep_rows, renew_inputs
from infra.workers.launch import kill_workers, monitored_workers
from infra.workers.layout import gpus_wanted
from infra.workers.nodes import check_nodes, leave_drained, wait_for_drain
from infra.workers.placement import leave_node, living_nodes, wait_for_nodes
from schemas.config.run import RunConfig
from schemas.errors import (
    ChunkCorruptedError,
    ChunkNotFoundError,
    DuplicateChunkError,
    PipelineError,
    RayLostError,
    VersionError,
    WorkerLostError,
)
from schemas.placement import Device
from schemas.step import EvalReport, PolicyHandle, RunHandle, RunSummary, StepReport, comparable
from tasks.assets import evaluated, evaluation_of
from tasks.operations import evaluate_policy, save_checkpoint, save_on_failure, start_all_workers

_DIGEST_CHARACTERS = 16
_ID_CHARACTERS = 12  # of the flow run's id, in a run's id: the last, as the first ones may be a time
# After these, the step is run again. Log-probs that are computed again, after a rank was lost, may differ by rounding.
RECOVERABLE = (WorkerLostError, VersionError, ChunkNotFoundError, ChunkCorruptedError, DuplicateChunkError)
CANCEL_SAVE_SECONDS = 5  # within the 10 s that a cancelled run may take to free its resources


async def ledger_storage(directory: RunDirectory) -> Path | RemoteFileSystem:
    """Return the result storage of the stages of a run.

    Prefect takes a remote file system only as a block that its server has. The block is saved at each start of a run,
    and nothing is read back from it: another server, or one that was wiped, changes nothing. Credentials are not part
    of it.

    Raises:
        httpx.HTTPError: The Prefect server doesn't respond, or refuses the block.
    """
    if directory.is_local:
        return Path(directory.ledger.place)
    # Other processes write there, too: a cached listing would be out of date.
    block = RemoteFileSystem(basepath=directory.ledger.place, settings={"use_listings_cache": False})
    digest = hashlib.sha256(directory.url.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    await block.asave(f"sluice-ledger-{digest}", overwrite=True)
    return block


def own_run_id(name: str) -> str:
    """Return the id of the run that belongs to the current flow run, the same for each of its attempts."""
    return f"{name}-{str(flow_run.id)[-_ID_CHARACTERS:]}"


def _flow_run_name() -> str:
    return flow_run.parameters.get("run_id") or own_run_id(flow_run.parameters["config"].name)


@flow(name="train", flow_run_name=_flow_run_name, persist_result=False, retries=0)  # whatever the user's profile says
async def train(config: RunConfig, run_id: str | None = None) -> RunSummary:
    """Run GRPO: start the run, or resume it if its directory exists.

    The id of a run is its identity. A flow run that is retried, rescheduled or started again with the same id continues
    the run exactly where it stopped; a finished run is left as it is.

    Args:
        config: The run's configuration. For an existing run, it may change where and how long the run trains.
        run_id: The run's id; None derives one from the config's name and the id of this flow run.

    Raises:
        ServiceError: No Ray head responds.
        ConfigError: The Ray cluster has too few cores or GPUs, or the engine is not built for what it has.
        RunError: The run exists and trains something else than `config`, or on other data than it was given, or was
            written by a newer Sluice.
        PipelineError: The run stopped; it can be resumed. Or another driver has taken it over.
        CancelledRun: It was cancelled in the Prefect UI; it can be resumed.
        Pause: It was suspended there, or by an automation; it can be resumed.
    """
    run_id = run_id or own_run_id(config.name)
    if (finished := finished_summary(config, run_id)) is not None:
        get_run_logger().info("run %s is complete: %d of %d steps", run_id, finished.steps, config.steps)
        return finished
    # What `cancellable` returns if the run is cancelled is a state, with which Prefect ends the flow run.
    return cast(RunSummary, await cancellable(train_policy(config, run_id)))


async def train_policy(config: RunConfig, run_id: str) -> RunSummary:
    """Run the steps that a run still lacks, within the current flow run; see `train`."""
    connect(config.services)
    device = None if RunDirectory.at(config, run_id).exists else _check_cluster(config)
    directory = find_or_create_run(config, run_id)
    async with AsyncExitStack() as stack:
        for context in (driver_lock(directory), driver_log(directory), logs_in_prefect(), infrequent_gc()):
            stack.enter_context(context)
        device = device or await _wait_for_device(directory, config)
        identity = claim_identity(directory, config)
        nodes = stack.enter_context(monitored_workers(identity, config))
        config = change_config(directory, config)
        if config.services.secrets:  # those that an earlier driver started may have older values
            kill_workers(identity, config)
        renew_inputs(directory, config)
        check_nodes(directory, config)
        drop_outdated_ledger(directory, config)
        stack.enter_context(traced_run(run_id, config))
        monitors = await stack.enter_async_context(open_monitors(directory, config, get_run_logger()))
        decided = config.replace(runtime=config.runtime.replace(device=device))  # nodes may be lost
        run = open_run(directory, _with_sharing(decided))
        reported = directory.metrics.num_steps(), directory.reported_checkpoint()
        events = RunEvents(run_id, directory.runs_dir, *reported)
        try:
            notice = Notice(config.timeouts.notice_seconds)
            with _workers_ended(run, directory):
                work = while_ray_lives(_train_on(run, directory, monitors, events, notice, nodes))
                async with newest_steps_kept(run_id, config.services):
                    run = await run_until(watch_lock(directory), terminable(work, notice))
                summary = summarize(directory, open_store(run).usage().num_bytes)
            directory.write_summary(summary)  # makes it complete: nothing is left that a resumed one had to end
            await report_run(run, directory, summary)
            return summary
        finally:
            done = directory.metrics.num_steps()
            events.end(done, is_complete=done == config.steps)


async def _wait_for_device(directory: RunDirectory, config: RunConfig) -> Device:
    """Return what the workers of a run that exists compute on; see `_check_cluster`.

    One that has started before stays on GPUs, unless its config says "cpu"; on a cluster of the user's, it waits for
    nodes in place of lost ones, unless it now asks for more.
    """
    if events := directory.metrics.events():
        if events[-1].device == "cuda" and config.runtime.device == "auto":
            config = config.replace(runtime=config.runtime.replace(device="cuda"))
        asks_for_more = gpus_wanted(config) > gpus_wanted(directory.config())
        if config.services.ray_address is not None and not asks_for_more:
            await wait_for_nodes(directory.run_id, config)
    return _check_cluster(config)


def _check_cluster(config: RunConfig) -> Device:
    """Return what the cluster's workers compute on, for which the engine is built, too."""
    from flows.preflight import check_cluster  # not at the top: torch is imported with it

    return check_cluster(config)


@contextmanager
def _workers_ended(run: RunHandle, directory: RunDirectory) -> Iterator[None]:
    """Kill the run's workers and close its store after the block."""
    try:
        yield
    finally:
        if holds_lock(directory):  # else they belong to another driver by now
            with suppress(RayLostError):  # they are gone with it
                kill_workers(run.identity, run.config)
                close_store(directory, run.config)


async def _train_on(
    run: RunHandle,
    directory: RunDirectory,
    monitors: Monitors,
    events: RunEvents,
    notice: Notice,
    nodes: Callable[[], set[str]],
) -> RunHandle:
    """Run all remaining steps; once a node of the run's is drained, save a checkpoint and go on without that node."""
    reason, recorded = "", len(directory.metrics.events())
    while True:
        loop = _training_loop(run, directory, monitors, events, notice, reason)
        ended = await run_until(_drained(notice, nodes), loop)
        if isinstance(ended, RunHandle):
            return ended
        for node in ended:
            leave_node(node)
        await run_in_thread("the run's workers", partial(kill_workers, run.identity, run.config))
        reason = notice.reason if len(directory.metrics.events()) > recorded else ""  # else its start was interrupted
        notice.withdraw()
        run = open_run(directory, run.config)


async def _drained(notice: Notice, nodes: Callable[[], set[str]]) -> set[str]:
    """Wait until some of the nodes are drained, and what the run has in hand is finished; return Ray's ids of them."""
    drained = await wait_for_drain(nodes)
    if notice.is_given:  # a SIGTERM, which ends the run
        await asyncio.Event().wait()
    addresses = living_nodes()
    names = [f"node {addresses.get(node, 'that is gone')} ({node[:8]})" for node in sorted(drained)]
    reason = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} drained"
    get_run_logger().warning("%s: a checkpoint is saved, and the run goes on without it", reason)
    await notice.give(reason, "the run goes on without it")
    return drained


def _with_sharing(config: RunConfig) -> RunConfig:
    """Decide whether samples share prompts, and say so."""
    from infra.engines.families import with_sharing  # not at the top: torch is imported with it

    config, line = with_sharing(config)
    get_run_logger().info(line)
    return config


async def _training_loop(
    run: RunHandle, directory: RunDirectory, monitors: Monitors, events: RunEvents, notice: Notice, reason: str = ""
) -> RunHandle:
    """Run all remaining steps, with new workers if they were ended for a reason; return the newest store's handle."""
    logger, restarts, furthest = get_run_logger(), 0, -1  # the furthest step from which it was restarted
    await finish_in_thread(partial(keep_rows, directory, run.config))
    policy = PolicyHandle(run_id=run.run_id, version=directory.metrics.num_steps(), incarnation="")
    if not reason:
        run, policy = await _start(run, directory, monitors)
        fork = load_fork(directory)  # the rewards of its parent may be others
        events.recall(directory.metrics.last_steps(fork.step if fork else 0))
        events.start(policy.step)
        await _review_last(run, directory)
    evals = directory.metrics.evals()  # read once, as a checkpoint may be written after each step
    measured = evaluation_digest(run.config)
    progress = await ProgressArtifact.create(run, policy, directory.metrics)
    step_flow = new_step_flow(await ledger_storage(directory), notice)
    with ExitStack() as stack:
        stack.enter_context(SyncClientContext.get_or_create())  # else each step makes two, with their TLS certificates
        stack.enter_context(sigterm_only_told())
        reporter = RunReporter(run, progress, monitors, events, directory.metrics)
        try:
            while True:
                try:
                    if reason and await _is_saved(run, policy, evals, measured):
                        await reporter.checkpoint(policy.version, evals)
                        await _review_last(run, directory)
                        return run
                    if reason:
                        run, policy = await _start(run, directory, monitors, reason)
                        evals, reason = directory.metrics.evals(), ""
                        await _review_last(run, directory)
                    with notice.held() if run.config.sft else nullcontext():  # by the ranks that hold the weights
                        await _evaluate(run, policy, evals, measured, reporter)
                    if policy.step == run.config.steps:
                        with notice.held(share=1):
                            await reporter.checkpoint(await save_checkpoint(run, policy, evals, wait=True), evals)
                            return run
                    with notice.released():  # until `policy` is the version that the ranks hold
                        report = await call_through_outages(
                            partial(step_flow, run, policy),
                            run.config.services.prefect_patience_seconds,
                            partial(directory.metrics.step, policy.step),
                        )
                        policy = policy.replace(version=report.policy_version)
                    await reporter.step(report)
                    if policy.step % run.config.checkpoint.every_steps == 0:
                        with notice.held(share=1):
                            complete = await save_checkpoint(run, policy, evals)
                        await reporter.checkpoint(complete, evals)
                    await _review(run, report, reporter)
                except RECOVERABLE as error:
                    restarts = restarts + 1 if policy.step <= furthest else 1
                    furthest = max(furthest, policy.step)
                    if restarts > run.config.runtime.max_restarts:
                        raise
                    logger.warning("running step %d again (restart %d): %s", policy.step, restarts, error)
                    await asyncio.sleep(SETTLE_SECONDS)  # a call to a Ray that ends meanwhile would never return
                    reason = str(error) or type(error).__name__
        except BaseException as error:
            await _save_what_can_be(run, policy, evals, error, notice)
            raise


async def _save_what_can_be(
    run: RunHandle, policy: PolicyHandle, evals: list[EvalReport], error: BaseException, notice: Notice
) -> None:
    """Save the policy's version after the run has failed or was ended, as far as its workers and the time allow."""
    limit, complete = None, None  # who ends a run waits for it
    if isinstance(error, asyncio.CancelledError | TerminationSignal):
        limit = notice.seconds_left if notice.is_given else CANCEL_SAVE_SECONDS
    saving = asyncio.wait_for(save_on_failure(run, policy, evals), limit)
    try:
        with suppress(PipelineError, TimeoutError), notice.held(share=1):
            complete = await (saving if limit is None else finish(saving))
    except OSError as failed:  # `error` is why the run ends
        get_run_logger().warning("the run directory can't be reached to save a checkpoint: %s", failed)
    if not notice.is_given:
        return
    if complete == policy.version:
        found = f"the checkpoint after step {complete} is complete"
    else:
        found = (
            f"no checkpoint of version {policy.version}: what the newest one lacks is computed again from its columns"
        )
    get_run_logger().info("%s, %.1f s ago: %s; %s", notice.reason, notice.seconds_passed, found, notice.then)


async def _review(run: RunHandle, report: StepReport, reporter: RunReporter) -> None:
    """Ask the run's saved queries about a finished step, and somebody's approval if it needs one."""
    failed = await find_failed_queries(run, report.step)
    reporter.queries(report, failed)
    await ask_for_approval(run, report, failed)


async def _review_last(run: RunHandle, directory: RunDirectory) -> None:
    """Ask for approval of the last step, if it needs some: its driver or a node may have been lost while it waited."""
    if (report := directory.metrics.last_step()) is not None:
        asks = run.config.approval.on_failed_queries
        await ask_for_approval(run, report, await find_failed_queries(run, report.step) if asks else ())


async def _is_saved(run: RunHandle, policy: PolicyHandle, evals: list[EvalReport], measured: str) -> bool:
    """Return whether all steps are done, and need no worker any more: the last version is saved, and evaluated."""
    from infra.checkpoints import open_checkpoints  # not at the top: torch is imported with it

    directory = RunDirectory.of(run)
    if not policy.step == directory.metrics.num_steps() == run.config.steps:
        return False
    if _wants_evaluation(run, policy, evals, measured):
        return False
    saved = await asyncio.to_thread(open_checkpoints(directory, run.config.checkpoint).complete_versions)
    return policy.version in saved


async def _start(
    run: RunHandle, directory: RunDirectory, monitors: Monitors, reason: str = ""
) -> tuple[RunHandle, PolicyHandle]:
    """Start the run's workers, for a reason again, on nodes that aren't drained; return what it goes on with."""
    if reason:
        await finish_in_thread(leave_drained)
        run = open_run(directory, run.config)
    await _start_workers(run)
    policy = await reconcile(run, directory)
    record_event(directory, policy, cast(Device, run.config.runtime.device), reason)
    monitors.log_recorded(directory.metrics)
    return run, policy


async def _start_workers(run: RunHandle) -> None:
    """Start the run's workers, and show where each computes."""
    places = await start_all_workers(run)
    get_run_logger().info("%d workers:\n%s", len(places), place_table(places))
    if run.config.runtime.placement == "colocated":
        get_run_logger().info(sharing_line(run.config))
    await show_placement(run.run_id, places)


async def _evaluate(
    run: RunHandle, policy: PolicyHandle, evals: list[EvalReport], measured: str, reporter: RunReporter
) -> None:
    """Evaluate the policy's version if the config asks for it and `evals` lacks it, as measured now; add it to them."""
    if not _wants_evaluation(run, policy, evals, measured):
        return
    directory = RunDirectory.of(run)
    inputs = evaluated(directory, run.config, policy.version, run.config.data.eval_path)
    report = await evaluate_policy.materializing(evaluation_of(directory), inputs)(run, policy)
    report = report.replace(measured=measured)
    directory.metrics.append_eval(report)
    evals.append(report)
    await reporter.evaluation(report)


def _wants_evaluation(run: RunHandle, policy: PolicyHandle, evals: list[EvalReport], measured: str) -> bool:
    every = run.config.eval.every_steps
    is_wanted = policy.step in (0, run.config.steps) or bool(every and policy.step % every == 0)
    if not run.config.data.eval_path or not is_wanted:
        return False
    return all(report.policy_version != policy.version for report in comparable(evals, measured))
