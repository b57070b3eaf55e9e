"""The plan of a pipeline: the runs of its stages with their complete configs, and what is checked before they start."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.configs import find_config
from flows.summary import finished_summary
from infra.storage import places
from infra.storage.folder import read_record
from infra.storage.runs import RunDirectory, open_folder
from infra.workers.inputs import evaluation_digest, tokenizer_digest
from schemas.base import Frozen
from schemas.batch import SafeName
from schemas.config.changes import measuring_changes, rejected_changes
from schemas.config.load import parse_config, parse_values, read_toml, set_value
from schemas.config.pipeline import PipelineConfig, flat_changes
from schemas.config.run import RunConfig
from schemas.config.runtime import ServicesConfig
from schemas.errors import ConfigError, RunError, UserError
from schemas.step import EvalReport

CURRENT = "current"  # the link to the promoted model
PLAN = "pipeline.json"


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

    @property
    def all_runs(self) -> list[PlannedRun]:
        """The runs of all stages."""
        return [run for runs in self.runs.values() for run in runs]

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
        ConfigError: A config is refused, lacks what the pipeline needs of it, or the services of two runs differ; or
            the id is the name of the link to the promoted model.
        RunError: The id is not the name of a folder.
    """
    if pipeline_id == CURRENT:
        raise ConfigError(
            f"a pipeline can't have the id {CURRENT}: {config.folder}/{CURRENT} is to link to the promoted model; "
            "choose another --id"
        )
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
    for run in plan.all_runs:
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
    from flows.preflight import check, check_run, check_start
    from infra.history.sql import check_query

    _check_folder(plan.config)
    _check_unchanged(plan)
    if (dtype := plan.config.export.dtype) is not None and dtype not in DTYPES:
        raise ConfigError(f"export.dtype = {dtype!r}: expected one of {', '.join(DTYPES)}")
    queries = {f"stages.{name}.best": stage.best for name, stage in plan.config.stages.items()}
    if plan.config.gate is not None:
        queries["gate.query"] = plan.config.gate.query
    for key, sql in queries.items():
        if sql is not None:
            with named(key):
                check_query(sql)
    is_new = stored_plan(plan.config, plan.pipeline_id) is None  # one that an earlier Sluice has begun goes on
    for name, runs in plan.runs.items():
        if plan.model_of(name).exists():
            continue
        unfinished = [run for run in runs if finished_summary(run.config, run.run_id) is None]
        with named(f"stage {name}"):
            if len(runs) > 1 and plan.config.stages[name].best is None:
                if is_new:
                    _check_measure(name, [run.config for run in runs])
                _check_comparable(runs, unfinished)
            for run in unfinished:
                if run.directory.exists:
                    check_start(run.config, run.directory)
                else:
                    check_run(plan.untrained(run.config, name))
    gate = plan.config.gate
    if gate is not None and gate.data_path is not None:
        with named("gate.data_path"):
            last = plan.runs[plan.config.last_stage][0].config
            last = plan.untrained(last, plan.config.last_stage)
            check(last.replace(data=last.data.replace(eval_path=gate.data_path)))


def _run_config(config: PipelineConfig, pipeline_id: str, name: str, changes: dict[str, Any]) -> RunConfig:
    """Return the config of a stage's run, with these changes of its sweep."""
    stage = config.stages[name]
    place, tree = f"stage {name}: {stage.config}", read_toml(find_config(stage.config))
    models = {key: str(_model_folder(config, pipeline_id, used)) for key, used in stage.used_stages.items()}
    for key, value in {**flat_changes(config.set), **flat_changes(stage.set), **changes, **models}.items():
        set_value(tree, key, value, place)
    return parse_config(tree, (), place)


def _check_stage(config: PipelineConfig, name: str, made: Sequence[RunConfig]) -> None:
    """Check that a stage's configs have what the pipeline needs of them."""
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
    """Check that models can be written, and one of them be promoted."""
    if places.is_url(config.folder):
        raise ConfigError(f"export.folder = {config.folder!r} is a URL; give a folder that all nodes share")
    link = Path(config.folder, CURRENT)
    if link.exists() and not link.is_symlink():
        raise ConfigError(f"{link}, which is to link to the promoted model, is no link; move it away")


def _check_measure(name: str, configs: Sequence[RunConfig]) -> None:
    """Check that the accuracy or loss of all runs of a sweep is that of the same thing."""
    first, *others = configs
    keys = {key for other in others for key in measuring_changes(first, other)}
    if first.sft is not None and len({tokenizer_digest(each) for each in configs}) > 1:
        keys.add("model.path")
    if keys:
        raise ConfigError(
            f"the best run of a sweep is that of the best held-out accuracy or loss, but these are no measure of runs "
            f"that differ in {', '.join(sorted(keys))}, on which the figures themselves depend; set stages.{name}.best "
            "to a query for the run_id by something else"
            + (", or eval.max_response_tokens" if keys == {"rollout.max_response_tokens"} else "")
        )


def _check_comparable(runs: Sequence[PlannedRun], unfinished: Sequence[PlannedRun]) -> None:
    """Check that all runs of a sweep are evaluated by the same rows and settings."""
    reports = {run.run_id: run.last_evaluation() for run in runs if run not in unfinished}
    found = {run_id: report.measured for run_id, report in reports.items() if report is not None and report.measured}
    found |= {run.run_id: evaluation_digest(run.config) for run in unfinished}
    if len(set(found.values())) > 1:
        (first, measured), *others = found.items()
        other = next(run_id for run_id, each in others if each != measured)
        raise RunError(
            f"runs {first} and {other} can't be compared, as they have other held-out rows or settings in `eval`: undo "
            "what has changed there, or start another pipeline with another --id"
        )


def _check_unchanged(plan: PipelinePlan) -> None:
    """Check that a pipeline that was started before would train the same, and choose by the same query."""
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
    if before.config.export.dtype != plan.config.export.dtype and plan.model_of(plan.config.last_stage).exists():
        changed.append("export.dtype")
    if changed:
        raise RunError(
            f"pipeline {plan.pipeline_id} can't go on with a different {', '.join(sorted(changed))}: that would be "
            f"another model; start another pipeline with another --id, or undo this change (it was started with "
            f"{plan.folder / PLAN})"
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
    return read_record(folder, PLAN, PipelinePlan, "restore it, or start another pipeline")


def _model_folder(config: PipelineConfig, pipeline_id: str, stage: str) -> Path:
    return Path(config.folder, pipeline_id, stage)


def _changed(before: ServicesConfig, after: ServicesConfig) -> list[str]:
    fields = type(before).model_fields
    return [f"services.{name}" for name in fields if getattr(before, name) != getattr(after, name)]


@contextmanager
def named(place: str) -> Iterator[None]:
    """Name the place in the message of an error that the user can fix."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{place}: {error}") from None
