"""Pipelines: runs that start from each other's models, a gate, and the promotion of the last model.

The state of a pipeline is in files: its plan, the directories of its runs, and the models of finished stages. So a
pipeline that is started again with its id goes on where it was.
"""

import asyncio
import os
import re
import shutil
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from prefect import Flow, flow, get_run_logger
from prefect.runtime import flow_run

from flows.configs import find_config
from flows.lifecycle.cancellation import cancellable
from flows.summary import finished_summary
from flows.train import train
from infra.storage import places
from infra.storage.folder import read_record
from infra.storage.runs import RunDirectory, open_folder, resumed_config
from schemas.base import Frozen
from schemas.batch import SafeName
from schemas.config.changes import rejected_changes
from schemas.config.load import parse_config, parse_values, read_toml, set_value
from schemas.config.pipeline import PipelineConfig, StageConfig, flat_changes
from schemas.config.run import RunConfig
from schemas.config.runtime import ServicesConfig
from schemas.errors import ConfigError, GateError, NonFiniteError, PipelineError, QueryError, RunError, UserError
from schemas.step import EvalReport, RunSummary
from tasks.assets import asset_at, describe, evaluation_of
from tasks.stage import operation

CURRENT = "current"  # the link to the promoted model
_PLAN, _RESULT = "pipeline.json", "result.json"
_PARAMETER = re.compile(r"\$([A-Za-z]\w*)")

Turn = Callable[[str], AbstractAsyncContextManager[None]]  # of the runs of a pool


class PlannedRun(Frozen):
    """A run of a stage."""

    run_id: SafeName
    config: RunConfig
    changes: dict[str, Any]  # of the sweep, by dotted key

    @property
    def directory(self) -> RunDirectory:
        """Where it is, or will be."""
        return RunDirectory.at(self.config, self.run_id)

    def last_evaluation(self) -> EvalReport | None:
        """Return the evaluation of what it has trained; None if it isn't finished, or has none."""
        reports = self.directory.metrics.evals()
        return next((each for each in reversed(reports) if each.policy_version == self.config.steps), None)

    def __str__(self) -> str:
        changes = ", ".join(f"{key}={value}" for key, value in self.changes.items())
        return f"{self.run_id} ({changes})" if changes else self.run_id


class PipelinePlan(Frozen):
    """A pipeline with its id, and the runs of its stages, whose configs are complete."""

    pipeline_id: SafeName
    config: PipelineConfig
    runs: dict[str, tuple[PlannedRun, ...]]  # by stage, in their order

    @property
    def services(self) -> ServicesConfig:
        """The services of all runs."""
        return next(iter(self.runs.values()))[0].config.services

    @property
    def folder(self) -> Path:
        """Where the pipeline's files are: its plan, and the models of its stages."""
        return Path(self.config.folder, self.pipeline_id)

    def model_of(self, stage: str) -> Path:
        """Return the folder of a stage's model, which exists once the stage is finished."""
        return _model_folder(self.config, self.pipeline_id, stage)

    def untrained(self, config: RunConfig, stage: str) -> RunConfig:
        """Return the config of a stage's run with models that exist: in place of a stage's, the one it started from.

        They have the same architecture and tokenizer, so that the run can be checked before those are trained.
        """
        tree = config.model_dump(mode="json")
        for key, used in self.config.stages[stage].used_stages.items():
            if not self.model_of(used).exists():
                first = self.config.first_stage_of(used)
                set_value(tree, key, self.runs[first][0].config.model.path, f"stage {stage}")
        return RunConfig.model_validate(tree)


class PipelineResult(Frozen):
    """The end of a pipeline, the content of `result.json`."""

    pipeline_id: SafeName
    best: dict[str, SafeName]  # the id of each stage's run, of a sweep the best one
    model: str  # the folder of the promoted model
    accuracy: float | None  # of it, held-out; None: the last stage has no held-out prompts
    gain: float | None  # over the model that the last stage started from


def is_pipeline(path: str) -> bool:
    """Return whether a config file is a pipeline's: it has stages.

    Raises:
        ConfigError: The file can't be read.
    """
    return "stages" in read_toml(find_config(path))


def load_pipeline(path: str, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read the file of a pipeline.

    Args:
        path: A TOML file.
        overrides: `section.key=value` changes to the file, e.g. `stages.grpo.set.optim.lr=1e-4`.

    Raises:
        ConfigError: The file or an override can't be read, or a key or value is invalid.
    """
    return parse_values(PipelineConfig, read_toml(Path(path)), overrides, path)


def plan_pipeline(config: PipelineConfig, pipeline_id: str) -> PipelinePlan:
    """Return the plan of a pipeline: the configs of all runs, which are read from their files.

    Raises:
        ConfigError: A config is refused, lacks what the pipeline needs of it, or the services of two runs differ.
        RunError: The id is not the name of a folder.
    """
    runs = {}
    for name, stage in config.stages.items():
        made = [_run_config(config, pipeline_id, name, changes) for changes in stage.combinations()]
        numbers = [f"-{number}" if stage.sweep else "" for number in range(1, len(made) + 1)]
        ids = [f"{pipeline_id}-{name}{number}" for number in numbers]
        RunDirectory.at(made[0], ids[0])  # raises if the id can't be a run's
        planned = zip(ids, made, stage.combinations(), strict=True)
        runs[name] = tuple(PlannedRun(run_id=each, config=run, changes=changes) for each, run, changes in planned)
        _check_stage(config, name, made)
    plan = PipelinePlan(pipeline_id=pipeline_id, config=config, runs=runs)
    for run in _all_runs(plan):
        if run.config.services != plan.services:
            different = ", ".join(_changed(plan.services, run.config.services))
            raise ConfigError(
                f"the runs of a pipeline have the same services, but {run.run_id} has other {different}; set them for "
                "all stages in the pipeline's `set`"
            )
    return plan


def check_pipeline(plan: PipelinePlan) -> None:
    """Check all of a pipeline that is to start or to go on: its runs, their data and models, and its queries.

    Raises:
        UserError: A part of it is not usable, or it was started with something else.
    """
    from flows.export import DTYPES  # not at the top: torch is imported with these
    from flows.preflight import check, check_run
    from infra.history.sql import check_query
    from infra.models.load import check_weight_files

    _check_folder(plan.config)
    _check_unchanged(plan)
    if (dtype := plan.config.export.dtype) is not None and dtype not in DTYPES:
        raise ConfigError(f"export.dtype = {dtype!r}: expected one of {', '.join(DTYPES)}")
    queries = {f"stages.{name}.best": stage.best for name, stage in plan.config.stages.items()}
    if plan.config.gate is not None:
        queries["gate.query"] = plan.config.gate.query
    for key, sql in queries.items():
        if sql is not None:
            with _named(key):
                check_query(sql)
    for name, runs in plan.runs.items():
        for run in runs:
            if plan.model_of(name).exists() or finished_summary(run.config, run.run_id) is not None:
                continue
            with _named(f"stage {name}"):
                if run.directory.exists:
                    check_run(resumed_config(run.directory, run.config), run.directory)
                else:
                    config = plan.untrained(run.config, name)
                    check_run(config)
                    check_weight_files(config.model)
    gate = plan.config.gate
    if gate is not None and gate.data_path is not None:
        with _named("gate.data_path"):
            last = plan.runs[plan.config.last_stage][0].config
            last = plan.untrained(last, plan.config.last_stage)
            check(last.replace(data=last.data.replace(eval_path=gate.data_path)))


@flow(name="pipeline", flow_run_name="{plan.pipeline_id}", persist_result=False, retries=0, validate_parameters=False)
async def pipeline(plan: PipelinePlan) -> PipelineResult:
    """Run the stages that a pipeline still lacks, then the gate, and promote the last model.

    Raises:
        GateError: The model is not what the gate asks for; nothing is promoted.
        PipelineError: A run stopped; the pipeline can be started again with its id.
        CancelledRun: It was cancelled in the Prefect UI; the same.
    """
    return cast(PipelineResult, await cancellable(run_pipeline(plan)))


async def run_pipeline(plan: PipelinePlan, turn: Turn = lambda pool: nullcontext()) -> PipelineResult:
    """Run a pipeline within the current flow run, see `pipeline`.

    Args:
        plan: The pipeline.
        turn: Makes the context of each run, given its pool, in which it waits until it may begin.
    """
    logger, folder = get_run_logger(), open_folder(str(plan.folder))
    if (done := read_record(folder, _RESULT, PipelineResult, "restore it")) is not None:
        logger.info("pipeline %s is complete: %s was promoted", plan.pipeline_id, done.model)
        return done
    folder.write(_PLAN, plan.model_dump_json(indent=2).encode())
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
    if out.exists():
        logger.info("stage %s is finished: %s", name, out)
        return await asyncio.to_thread(_find_best, plan.config.stages[name], runs)
    await _train_all(name, runs, plan.config.stages[name].max_runs, turn)
    best = await asyncio.to_thread(_find_best, plan.config.stages[name], runs)
    if len(runs) > 1:
        logger.info("stage %s: the best run is %s: %s", name, best, best.last_evaluation() or "by the query")
    for left in out.parent.glob(f".{out.name}-*"):  # of an export that was killed
        shutil.rmtree(left)
    dtype = plan.config.export.dtype if name == plan.config.last_stage else None
    await export_as_asset(best.directory, out, dtype=dtype)
    logger.info("stage %s: wrote the model of %s to %s", name, best.run_id, out)
    return best


async def _train_all(name: str, runs: Sequence[PlannedRun], limit: int, turn: Turn) -> None:
    """Train a stage's runs, so many at the same time; one of a sweep that diverges is left out.

    Raises:
        PipelineError: A run stopped; the others were stopped, too.
    """
    slots = asyncio.Semaphore(limit)

    async def train_one(run: PlannedRun) -> None:
        async with slots, turn(run.config.runtime.pool):
            get_run_logger().info("stage %s: run %s", name, run)
            try:
                await _train_flow(run)(run.config, run.run_id)
            except NonFiniteError as error:
                if len(runs) == 1:
                    raise
                get_run_logger().warning("stage %s: %s diverged, and is left out: %s", name, run, error)

    unfinished = [run for run in runs if finished_summary(run.config, run.run_id) is None]
    tasks = [asyncio.ensure_future(train_one(run)) for run in unfinished]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _train_flow(run: PlannedRun) -> Flow[[RunConfig, str], Coroutine[Any, Any, RunSummary]]:
    """Return the flow `train` for one run of this attempt.

    Prefect knows a subflow by its function's name and the number of calls before. A second attempt calls other ones,
    and must not be given the first one's results.
    """

    async def train_run(config: RunConfig, run_id: str) -> RunSummary:
        return await train.fn(config, run_id)

    train_run.__qualname__ = f"train_{run.run_id}_{flow_run.run_count}"
    return flow(name="train", flow_run_name=run.run_id, persist_result=False, retries=0, validate_parameters=False)(
        train_run
    )


def _find_best(stage: StageConfig, runs: Sequence[PlannedRun]) -> PlannedRun:
    """Return a stage's finished run, of a sweep the best one; of equal ones the first.

    Raises:
        PipelineError: All of them have diverged.
        QueryError: The query names none of them.
    """
    if len(runs) == 1:
        return runs[0]
    finished = [run for run in runs if finished_summary(run.config, run.run_id) is not None]
    if not finished:
        raise PipelineError(f"all runs of the sweep have diverged, {runs[0].run_id} and others; try other values")
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
    """Return accuracy and gain of the last model.

    Raises:
        GateError: The gate asks for more.
        QueryError: Its query can't be answered.
    """
    run = best[plan.config.last_stage]
    after, before = await asyncio.to_thread(_accuracies, plan, run)
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
        reports = {each.policy_version: each.accuracy for each in run.directory.metrics.evals()}
        return reports.get(run.config.steps), reports.get(0)
    from flows.evaluate import evaluate_model  # not at the top: torch is imported with it

    after = evaluate_model(run.config, str(plan.model_of(plan.config.last_stage)), gate.data_path)
    before = None if gate.min_gain is None else evaluate_model(run.config, run.config.model.path, gate.data_path)
    for what, report in (("model of the last stage", after), ("model that it started from", before)):
        if report is not None:
            get_run_logger().info("gate: %s on %s: %s (%d rows)", what, gate.data_path, report, report.num_prompts)
    return after.accuracy, None if before is None else before.accuracy


def _failures(plan: PipelinePlan, best: dict[str, PlannedRun], accuracy: float | None, gain: float | None) -> list[str]:
    """Return what the gate asks for, and is not the case."""
    gate = plan.config.gate
    assert gate is not None
    failed = [
        f"{what} {value:.4f} is less than gate.{key} = {limit:g}"
        for what, key, value, limit in (
            ("accuracy", "min_accuracy", accuracy, gate.min_accuracy),
            ("gain", "min_gain", gain, gate.min_gain),
        )
        if limit is not None and value is not None and value < limit
    ]
    if gate.query is not None:
        finished = [run for run in _all_runs(plan) if run.directory.summary() is not None]
        ids = {name: run.run_id for name, run in best.items()}
        answer = _ask(gate.query, finished, ids, "gate.query")
        if not isinstance(answer, bool | None):
            raise QueryError(f"gate.query: expected true or false, got {answer!r}; compare it with a limit")
        if not answer:
            failed.append(f"gate.query is {'null' if answer is None else 'false'}: {' '.join(gate.query.split())}")
    return failed


def _ask(sql: str, runs: Iterable[PlannedRun], ids: dict[str, str], key: str) -> object:
    """Return the only value of a query over runs, in which `$NAME` stands for an id.

    Raises:
        QueryError: It is refused, or has another number of values.
    """
    from infra.history.sql import RunQueries  # not at the top: pipelines without queries need no DuckDB
    from infra.history.views import SANDBOX

    parameters: dict[str, object] = {name: ids[name] for name in _PARAMETER.findall(sql) if name in ids}
    with _named(key):
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
        describe(promoted, {"run_id": run.run_id, "pipeline_id": plan.pipeline_id, "accuracy": result.accuracy})

    gate = plan.config.gate
    data = [] if gate is None or gate.data_path is None else [asset_at(gate.data_path)]
    await promote.materializing(promoted, [asset_at(result.model), evaluation_of(run.directory), *data])()


def _run_config(config: PipelineConfig, pipeline_id: str, name: str, changes: dict[str, Any]) -> RunConfig:
    """Return the config of a stage's run, with these changes of its sweep.

    Raises:
        ConfigError: It is refused.
    """
    stage = config.stages[name]
    place, tree = f"stage {name}: {stage.config}", read_toml(find_config(stage.config))
    models = {key: str(_model_folder(config, pipeline_id, used)) for key, used in stage.used_stages.items()}
    for key, value in {**flat_changes(config.set), **flat_changes(stage.set), **changes, **models}.items():
        set_value(tree, key, value, place)
    return parse_config(tree, (), place)


def _check_stage(config: PipelineConfig, name: str, made: Sequence[RunConfig]) -> None:
    """Check that a stage's configs have what the pipeline needs of them.

    Raises:
        ConfigError: One hasn't.
    """
    stage = config.stages[name]
    if any(run.data.eval_path is None for run in made):
        if stage.sweep and stage.best is None:
            raise ConfigError(
                f"stage {name}: the best run of a sweep is that of the best held-out accuracy or loss, but its config "
                "has no data.eval_path; set it, or stages."
                f"{name}.best to a query for the run_id"
            )
        gate = config.gate if name == config.last_stage else None
        if gate is not None and gate.needs_accuracy and gate.data_path is None:
            raise ConfigError(
                f"stage {name}: the gate asks for its held-out accuracy, but its config has no data.eval_path; set it, "
                "or gate.data_path"
            )
    if stage.max_runs > 1 and any(run.runtime.tracing for run in made):
        raise ConfigError(
            f"stage {name}: max_runs = {stage.max_runs} has runs at the same time, whose spans one process can't tell "
            "apart; set runtime.tracing = false, or max_runs = 1"
        )


def _check_folder(config: PipelineConfig) -> None:
    """Check that models can be written, and one of them be promoted.

    Raises:
        ConfigError: The folder is a URL, or what should be the link in it is something else.
    """
    if places.is_url(config.folder):
        raise ConfigError(f"export.folder = {config.folder!r} is a URL; give a folder that all nodes share")
    link = Path(config.folder, CURRENT)
    if link.exists() and not link.is_symlink():
        raise ConfigError(f"{link}, which is to link to the promoted model, is no link; move it away")


def _check_unchanged(plan: PipelinePlan) -> None:
    """Check that a pipeline that was started before would train the same, and choose by the same query.

    Raises:
        RunError: It would do something else.
    """
    if (before := stored_plan(plan.config, plan.pipeline_id)) is None:
        return
    changed = [] if list(before.runs) == list(plan.runs) else ["stages"]
    for name in before.runs.keys() & plan.runs.keys():
        old, new = before.runs[name], plan.runs[name]
        if [run.changes for run in old] != [run.changes for run in new]:
            changed.append(f"stages.{name}.sweep")
            continue
        if before.config.stages[name].best != plan.config.stages[name].best:
            changed.append(f"stages.{name}.best")
        keys = {key for pair in zip(old, new, strict=True) for key in _rejected(*(run.config for run in pair))}
        changed += [f"{key} of stage {name}" for key in sorted(keys)]
    if changed:
        raise RunError(
            f"pipeline {plan.pipeline_id} can't go on with a different {', '.join(sorted(changed))}: that would be "
            f"another model; start another pipeline with another --id, or undo this change (it was started with "
            f"{plan.folder / _PLAN})"
        )


def _rejected(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the keys in which two configs differ although the model of a finished stage would be another one."""
    return [*rejected_changes(before, after), *(["steps"] if before.steps != after.steps else [])]


def stored_plan(config: PipelineConfig, pipeline_id: str) -> PipelinePlan | None:
    """Return the plan with which a pipeline was started; None if it wasn't.

    Raises:
        RunError: The file is damaged, or of another version of Sluice.
    """
    folder = open_folder(str(Path(config.folder, pipeline_id)))
    return read_record(folder, _PLAN, PipelinePlan, "restore it, or start another pipeline")


def _model_folder(config: PipelineConfig, pipeline_id: str, stage: str) -> Path:
    return Path(config.folder, pipeline_id, stage)


def _all_runs(plan: PipelinePlan) -> list[PlannedRun]:
    return [run for runs in plan.runs.values() for run in runs]


def _changed(before: ServicesConfig, after: ServicesConfig) -> list[str]:
    fields = type(before).model_fields
    return [f"services.{name}" for name in fields if getattr(before, name) != getattr(after, name)]


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Name the place in the message of an error that the user can fix."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{place}: {error}") from None
