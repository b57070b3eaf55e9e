"""Pipelines: runs that start from each other's models, a gate, and the promotion of the last model.

The state of a pipeline is in files: its plan, the directories of its runs, and the models of finished stages. So a
pipeline that is started again with its id goes on where it was.
"""

import asyncio
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from prefect import Flow, flow, get_run_logger
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run

from flows.lifecycle.cancellation import cancellable, run_in_thread, sigterm_only_told, terminable
from flows.lifecycle.outages import call_through_outages
from flows.pipeline_plan import CURRENT, PLAN, PipelinePlan, PlannedRun, named
from flows.summary import finished_summary
from flows.train import train
from infra.storage.driver_lock import file_lock
from infra.storage.folder import read_record, sync_folder
from infra.storage.runs import installed_versions, open_folder
from infra.workers.inputs import code_digests, data_digest, given_folder
from schemas.base import Frozen, digest_of
from schemas.batch import SafeName
from schemas.config.pipeline import StageConfig
from schemas.config.run import RunConfig
from schemas.errors import (
    CheckpointError,
    GateError,
    GpuMemoryError,
    NonFiniteError,
    PipelineError,
    PlanError,
    QueryError,
    RayLostError,
    ResourcesError,
    ServerLostError,
)
from schemas.step import EvalReport, RunSummary, comparable
from tasks.assets import asset_at, describe, evaluation_of
from tasks.stage import operation

_RESULT = "result.json"
_ROUNDING = 1e-9  # 0.6 - 0.5 is less than 0.1
_OF_SURROUNDINGS = (RayLostError, ResourcesError, ServerLostError)  # at which the next run would stop, too
_PARAMETER = re.compile(r"\$([A-Za-z]\w*)")


class Turn(Protocol):
    """Makes the context of a run, in which it waits until it may begin."""

    def __call__(self, config: RunConfig, *, shows_queue: bool) -> AbstractAsyncContextManager[None]:
        """Return the context; `shows_queue`: until the run may begin, nothing of the current flow run goes on."""


class PipelineResult(Frozen):
    """The end of a pipeline, the content of `result.json`."""

    pipeline_id: SafeName
    best: dict[str, SafeName]  # the id of each stage's run, of a sweep the best one
    model: str  # the folder of the promoted model
    accuracy: float | None  # of it, held-out; None: the last stage has no held-out prompts
    gain: float | None  # over the model that the last stage started from


@flow(name="pipeline", flow_run_name="{plan.pipeline_id}", persist_result=False, retries=0, validate_parameters=False)
async def pipeline(plan: PipelinePlan) -> PipelineResult:
    """Run the stages that a pipeline still lacks, then the gate, and promote the last model.

    Raises:
        GateError: The model is not what the gate asks for; nothing is promoted.
        PipelineError: A run stopped; the pipeline can be started again with its id.
        RunError: Another process runs this pipeline.
        CancelledRun: It was cancelled in the Prefect UI; the same.
    """
    return cast(PipelineResult, await cancellable(run_stages(plan)))


async def run_stages(plan: PipelinePlan, turn: Turn = lambda config, *, shows_queue: nullcontext()) -> PipelineResult:
    """Run a pipeline within the current flow run, see `pipeline`.

    Args:
        plan: The pipeline.
        turn: Makes the context of each run.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    advice = "wait for its end, or end that process first"
    with file_lock(plan.folder / "driver.lock", f"pipeline {plan.pipeline_id}", advice):
        return await _run_stages(plan, turn)


def finished_result(plan: PipelinePlan) -> PipelineResult | None:
    """Return the result of a pipeline that is complete; None if it isn't."""
    return read_record(open_folder(str(plan.folder)), _RESULT, PipelineResult, "restore it")


async def _run_stages(plan: PipelinePlan, turn: Turn) -> PipelineResult:
    logger, folder = get_run_logger(), open_folder(str(plan.folder))
    if (done := finished_result(plan)) is not None:
        logger.info("pipeline %s is complete: %s was promoted", plan.pipeline_id, done.model)
        return done
    folder.write(PLAN, plan.model_dump_json(indent=2).encode())
    best = {}
    for name in plan.runs:
        best[name] = await _run_stage(plan, name, turn)
    accuracies = await _pass_gate(plan, best)
    result = PipelineResult(
        pipeline_id=plan.pipeline_id,
        best={name: run.run_id for name, run in best.items()},
        model=str(plan.model_of(plan.config.last_stage)),
        **accuracies,
    )
    await _promote(plan, result, best[plan.config.last_stage])
    folder.write(_RESULT, result.model_dump_json(indent=2).encode())
    logger.info("promoted %s", result.model)
    return result


async def _run_stage(plan: PipelinePlan, name: str, turn: Turn) -> PlannedRun:
    """Run a stage, unless its model exists, and write its model; return its run, of a sweep the best one."""
    from flows.export import export_as_asset  # not at the top: torch is imported with it

    logger, runs, out = get_run_logger(), plan.runs[name], plan.model_of(name)
    folder, chosen = open_folder(str(plan.folder)), f"{name}.best"
    if out.exists():
        logger.info("stage %s is finished: %s", name, out)
        found = folder.read(chosen)  # earlier versions of Sluice wrote none
        if recorded := [run for run in runs if run.run_id.encode() == found]:
            return recorded[0]
        return await asyncio.to_thread(_find_best, plan.config.stages[name], runs)
    await _train_all(plan, name, turn)
    best = await asyncio.to_thread(_find_best, plan.config.stages[name], runs)
    if len(runs) > 1:
        logger.info("stage %s: the best run is %s: %s", name, best, best.last_evaluation() or "by the query")
        folder.write(chosen, best.run_id.encode())  # before the model, whose run it is, whatever becomes of the others
    for left in out.parent.glob(f".{out.name}-*"):  # of an export that was killed
        shutil.rmtree(left)
    dtype = plan.config.export.dtype if name == plan.config.last_stage else None
    try:
        await export_as_asset(best.directory, out, version=best.config.steps, dtype=dtype)
    except CheckpointError as error:
        raise CheckpointError(
            f"stage {name}: {error}; to train {best.run_id} again from its checkpoint before that, remove "
            f"{best.directory.url}/summary.json, and start the pipeline again"
        ) from None
    logger.info("stage %s: wrote the model of %s to %s", name, best.run_id, out)
    return best


async def _train_all(plan: PipelinePlan, name: str, turn: Turn) -> None:
    """Train a stage's runs, so many at the same time; of a sweep, those that its values stop are left out, for good.

    If one of a sweep stops for another reason, that is raised once the others have ended.
    """
    runs, slots = plan.runs[name], asyncio.Semaphore(plan.config.stages[name].max_runs)
    folder, stopped, training = open_folder(str(plan.folder)), list[PipelineError](), set[str]()
    queues = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by pool

    async def train_in_turn(run: PlannedRun) -> None:
        async with AsyncExitStack() as stack:
            async with queues[run.config.runtime.pool]:  # so that each sees whether the one before it may train
                await stack.enter_async_context(turn(run.config, shows_queue=not training))
            training.add(run.run_id)
            stack.callback(training.remove, run.run_id)
            get_run_logger().info("stage %s: run %s", name, run)
            await call_through_outages(
                lambda: _train_flow(run, is_one_of_several=len(waiting) > 1)(run.config, run.run_id),
                run.config.services.prefect_patience_seconds,
                partial(finished_summary, run.config, run.run_id),
            )

    async def train_one(run: PlannedRun) -> None:
        async with slots:
            if any(isinstance(error, _OF_SURROUNDINGS) for error in stopped):
                return
            try:
                await train_in_turn(run)
            except PipelineError as error:
                if len(runs) == 1:
                    raise
                if _is_of_values(error, run):
                    folder.write(_diverged(run), f"{type(error).__name__}: {error}".encode())
                    get_run_logger().warning("stage %s: %s is left out: %s", name, run, error)
                else:
                    stopped.append(error)
                    get_run_logger().error("stage %s: %s stopped: %s", name, run, error)

    unfinished = [run for run in runs if finished_summary(run.config, run.run_id) is None]
    waiting = [run for run in unfinished if folder.size(_diverged(run)) is None]
    tasks = [asyncio.ensure_future(terminable(train_one(run))) for run in waiting]
    with sigterm_only_told() if len(tasks) > 1 else nullcontext():
        try:
            await asyncio.gather(*tasks)
            if stopped:
                raise stopped[0]
        except TerminationSignal:  # all are told of it: each ends by itself, within its notice
            await asyncio.wait(tasks)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _is_of_values(error: PipelineError, run: PlannedRun) -> bool:
    """Return whether a run would stop at the same error again: a GPU that was full once, after a step, may be free."""
    if isinstance(error, GpuMemoryError):
        return not run.directory.metrics.num_steps()
    return isinstance(error, NonFiniteError | PlanError)


def _diverged(run: PlannedRun) -> str:
    """Return the name of the pipeline's file that says why a run is left out."""
    return f"{run.run_id}.diverged"


def _train_flow(run: PlannedRun, *, is_one_of_several: bool) -> Flow[[RunConfig, str], Coroutine[Any, Any, RunSummary]]:
    """Return the flow `train` for one run of this attempt; while others train, it has a SIGTERM raise nothing, either.

    Prefect knows a subflow by its function's name and the number of calls before. A second attempt calls other ones,
    and must not be given the first one's results.
    """

    async def train_run(config: RunConfig, run_id: str) -> RunSummary:
        with sigterm_only_told() if is_one_of_several else nullcontext():
            return await train.fn(config, run_id)

    train_run.__qualname__ = f"train_{run.run_id}_{flow_run.run_count}"
    return flow(name="train", flow_run_name=run.run_id, persist_result=False, retries=0, validate_parameters=False)(
        train_run
    )


def _find_best(stage: StageConfig, runs: Sequence[PlannedRun]) -> PlannedRun:
    """Return a stage's finished run, of a sweep the best one; of equal ones the first."""
    if len(runs) == 1:
        return runs[0]
    finished = [run for run in runs if finished_summary(run.config, run.run_id) is not None]
    if not finished:
        raise PipelineError(
            f"no run of the sweep is finished, of {runs[0].run_id} and the others: for each that was left out, a file "
            f"such as {_diverged(runs[0])} in the pipeline's folder says why; remove it to train that run again, or "
            "try other values with another --id"
        )
    if stage.best is not None:
        named = _ask(stage.best, finished, {}, "best")
        if (found := next((run for run in finished if run.run_id == named), None)) is None:
            ids = ", ".join(run.run_id for run in finished)
            raise QueryError(f"best: expected the run_id of a finished run ({ids}), got {named!r}")
        return found
    return max(finished, key=_score)


def _score(run: PlannedRun) -> float:
    report = run.last_evaluation()
    assert report is not None, f"{run.run_id} has held-out prompts"  # see `_check_stage`
    return report.score


async def _pass_gate(plan: PipelinePlan, best: dict[str, PlannedRun]) -> dict[str, float | None]:
    """Return accuracy and gain of the last model."""
    run = best[plan.config.last_stage]
    after, before = await run_in_thread("the gate's evaluation", partial(_accuracies, plan, run))
    gain = None if after is None or before is None else after - before

    @operation("gate")
    async def gate() -> None:
        failed = await asyncio.to_thread(_failures, plan, best, after, gain)
        if failed:
            raise GateError(
                f"{run.run_id} doesn't pass the gate of pipeline {plan.pipeline_id}: {'; '.join(failed)}; its "
                f"model is not promoted, and stays in {plan.model_of(plan.config.last_stage)}"
            )

    if plan.config.gate is not None:
        await gate()
    return {"accuracy": after, "gain": gain}


def _accuracies(plan: PipelinePlan, run: PlannedRun) -> tuple[float | None, float | None]:
    """Return the accuracy of the last model, and of the model that its run started from, if they are known."""
    gate = plan.config.gate
    if gate is None or gate.data_path is None:
        reports = {each.policy_version: each.accuracy for each in comparable(run.directory.metrics.evals())}
        return reports.get(run.config.steps), reports.get(0)
    after = _measure(plan, run.config, str(plan.model_of(plan.config.last_stage)), gate.data_path)
    base = given_folder(run.directory, run.config.model.path)  # the path may be that of the promoted model by now
    before = None if gate.min_gain is None else _measure(plan, run.config, base, gate.data_path)
    for what, report in (("model of the last stage", after), ("model that it started from", before)):
        if report is not None:
            get_run_logger().info("gate: %s on %s: %s (%d rows)", what, gate.data_path, report, report.num_prompts)
    return after.accuracy, None if before is None else before.accuracy


def _measure(plan: PipelinePlan, config: RunConfig, model: str, data_path: str) -> EvalReport:
    """Evaluate a model on the gate's file, once: another limit needs no other evaluation."""
    from flows.evaluate import evaluate_model  # not at the top: torch is imported with these
    from infra.models.files import weights_digest

    by, rows = [config.model_dump_json(), code_digests(config), installed_versions()], data_digest(data_path)
    folder = open_folder(str(plan.folder))
    name = f"gate-{digest_of(json.dumps([by, weights_digest(model) or model, rows]))}.json"
    if (report := read_record(folder, name, EvalReport, "remove it")) is not None:
        get_run_logger().info("gate: %s was evaluated before; remove %s/%s to evaluate it again", model, folder, name)
        return report
    report = evaluate_model(config, model, data_path)
    if not report.num_failed:
        folder.write(name, report.model_dump_json().encode())
    return report


def _failures(plan: PipelinePlan, best: dict[str, PlannedRun], accuracy: float | None, gain: float | None) -> list[str]:
    """Return what the gate asks for, and is not the case."""
    gate = plan.config.gate
    assert gate is not None
    failed = [
        f"{what} is unknown, as its run has no evaluation of the model before and after; set gate.data_path"
        if value is None
        else f"{what} {value:.4f} is less than gate.{key} = {limit:g}"
        for what, key, value, limit in (
            ("accuracy", "min_accuracy", accuracy, gate.min_accuracy),
            ("gain", "min_gain", gain, gate.min_gain),
        )
        if limit is not None and (value is None or value < limit - _ROUNDING)
    ]
    if gate.query is not None:
        finished = [run for run in plan.all_runs if run.directory.summary() is not None]
        ids = {name: run.run_id for name, run in best.items()}
        answer = _ask(gate.query, finished, ids, "gate.query")
        if not isinstance(answer, bool | None):
            raise QueryError(f"gate.query: expected true or false, got {answer!r}; compare it with a limit")
        if not answer:
            failed.append(f"gate.query is {'null' if answer is None else 'false'}: {' '.join(gate.query.split())}")
    return failed


def _ask(sql: str, runs: Iterable[PlannedRun], ids: dict[str, str], key: str) -> object:
    """Return the only value of a query over runs, in which `$NAME` stands for an id."""
    from infra.history.sql import RunQueries  # not at the top: pipelines without queries need no DuckDB
    from infra.history.views import SANDBOX

    parameters: dict[str, object] = {name: ids[name] for name in _PARAMETER.findall(sql) if name in ids}
    with named(key):
        table = RunQueries([run.directory for run in runs], SANDBOX).query(sql, parameters or None)
    if (table.num_rows, table.num_columns) != (1, 1):
        raise QueryError(f"{key}: expected one value, got {table.num_rows} rows of {table.num_columns} columns")
    return table.column(0)[0].as_py()


async def _promote(plan: PipelinePlan, result: PipelineResult, run: PlannedRun) -> None:
    """Have `current` link to the model: readers see the model before or this one, never none."""
    folder = Path(plan.config.folder)
    promoted = asset_at(folder, f"{plan.config.name}: promoted model")

    @operation("promote")
    async def promote() -> None:
        temporary = folder / f".{CURRENT}-{plan.pipeline_id}"
        temporary.unlink(missing_ok=True)  # of a promotion that was killed
        temporary.symlink_to(Path(plan.pipeline_id, plan.config.last_stage))
        os.replace(temporary, folder / CURRENT)
        sync_folder(str(folder / CURRENT))
        describe(promoted, {"run_id": run.run_id, "pipeline_id": plan.pipeline_id, "accuracy": result.accuracy})

    gate = plan.config.gate
    data = [] if gate is None or gate.data_path is None else [asset_at(gate.data_path)]
    evaluation = [evaluation_of(run.directory)] if run.last_evaluation() else []
    await promote.materializing(promoted, [asset_at(result.model), *evaluation, *data])()
