"""Runs and pipelines started from Python: what `sluice train`, `resume` and `pipeline` do, with the result returned."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from flows.lifecycle.outages import call_through_outages
from flows.lifecycle.secrets import take_secrets
from flows.lifecycle.session import prefect_session
from flows.pipeline import PipelineResult, finished_result, pipeline
from flows.pipeline_plan import check_pipeline, plan_pipeline
from flows.preflight import check_start
from flows.recovery import is_resumable
from flows.summary import finished_summary
from flows.train import train
from infra.ray.cluster import disconnect, require_own
from infra.ray.module_path import append_working_directory
from infra.storage.runs import RunDirectory, new_run_id
from rl_core.user_code import imported_now
from schemas.config.load import parse_config, parse_values, read_toml
from schemas.config.pipeline import PipelineConfig
from schemas.errors import ConfigError, GateError
from schemas.step import RunSummary

Result = TypeVar("Result")

_active: list[str] = []  # the run or pipeline of this process


def train_run(
    config: Mapping[str, Any] | str | Path,
    *,
    reward: Callable[..., Any] | None = None,
    run_id: str | None = None,
) -> RunSummary:
    """Train, and return when the run is finished. Where an event loop runs, as in a notebook, use `train_run_async`.

    Everything is checked before anything is started. If neither the config nor the environment names a Prefect server
    and a Ray cluster, local ones are started, which stay until `sluice down`. The run is like one of `sluice train`:
    if it stops, the same call with its `run_id` continues it, and so does `sluice resume`.

    Args:
        config: The configuration, with its sections as dicts; or the path of a TOML file.
        reward: The reward function, in place of the config's `reward`: a plain function of this script or of a module,
            from which the reward processes import it.
        run_id: The run's id; an existing run is continued. None: the config's name and the time.

    Raises:
        UserError: Something in the config, the data, the model or the reward is not usable.
        PipelineError: The run stopped; it can be resumed.

    Example:
        >>> train_run({"model": {"path": "tiny"}, "data": {"train_path": "train.jsonl"}, "reward": {"kind": "exact"}})
        Traceback (most recent call last):
        schemas.errors.ConfigError: config: missing key steps
    """
    return _run_to_end("train_run", lambda: train_run_async(config, reward=reward, run_id=run_id))


async def train_run_async(
    config: Mapping[str, Any] | str | Path,
    *,
    reward: Callable[..., Any] | None = None,
    run_id: str | None = None,
) -> RunSummary:
    """Train as `train_run` does, in the running event loop; if cancelled, the run stops, and can be resumed."""
    append_working_directory()
    values, place = _values_of(config)
    if reward is not None:
        values["reward"] = {"kind": "function", "path": import_path(reward)}
    parsed = parse_config(values, (), place)
    run_id = run_id or new_run_id(parsed.name)
    with _only_run("train_run", run_id):
        take_secrets(parsed.services, starts=True)
        if (finished := finished_summary(parsed, run_id)) is not None:
            return finished
        checked = check_start(parsed, RunDirectory.at(parsed, run_id))
        with prefect_session(checked.services, Console()):
            try:
                return await call_through_outages(
                    lambda: train(checked, run_id=run_id), checked.services.prefect_patience_seconds
                )
            except Exception as error:
                directory = RunDirectory.at(checked, run_id)
                if is_resumable(directory, error):
                    call = f"call train_run with run_id={run_id!r}"
                    error.add_note(f"to resume, {call}, or: sluice resume {directory.argument}")
                raise


def run_pipeline(config: Mapping[str, Any] | str | Path, *, pipeline_id: str | None = None) -> PipelineResult:
    """Run a pipeline to its promoted model. Where an event loop runs, as in a notebook, use `run_pipeline_async`.

    All stages are checked before anything is started, and services start as for `train_run`. The pipeline is like one
    of `sluice pipeline`: if it stops, the same call with its `pipeline_id` goes on with it.

    Args:
        config: The pipeline, with its sections as dicts; or the path of a TOML file.
        pipeline_id: The pipeline's id; an existing pipeline goes on. None: the config's name and the time.

    Raises:
        UserError: Something in the pipeline, its configs, data, models or rewards is not usable, or another process
            runs it.
        GateError: The last model is not what the gate asks for; nothing is promoted.
        PipelineError: A run stopped; the pipeline can go on.

    Example:
        >>> run_pipeline({"stages": {"sft": {"config": "sft.toml"}}})
        Traceback (most recent call last):
        schemas.errors.ConfigError: config: missing key name
    """
    return _run_to_end("run_pipeline", lambda: run_pipeline_async(config, pipeline_id=pipeline_id))


async def run_pipeline_async(
    config: Mapping[str, Any] | str | Path, *, pipeline_id: str | None = None
) -> PipelineResult:
    """Run a pipeline as `run_pipeline` does, in the running event loop; if cancelled, it stops, and can go on."""
    append_working_directory()
    values, place = _values_of(config)
    parsed = parse_values(PipelineConfig, values, (), place)
    plan = plan_pipeline(parsed, pipeline_id or new_run_id(parsed.name))
    with _only_run("run_pipeline", plan.pipeline_id):
        take_secrets(plan.services, starts=True)
        check_pipeline(plan)
        if (finished := finished_result(plan)) is not None:
            return finished
        with prefect_session(plan.services, Console()):
            try:
                return await call_through_outages(lambda: pipeline(plan), plan.services.prefect_patience_seconds)
            except Exception as error:
                aim = "promote it with another gate" if isinstance(error, GateError) else "go on"
                error.add_note(f"to {aim}, call run_pipeline with pipeline_id={plan.pipeline_id!r}")
                raise


def _is_reloaded(found: Any, function: Callable[..., Any]) -> bool:
    """Return whether a function is an older object of the same code, as IPython's autoreload leaves it."""
    codes = [getattr(each, "__code__", None) for each in (found, function)]
    closures = [getattr(each, "__closure__", None) for each in (found, function)]
    return codes[0] is not None and codes[0] is codes[1] and closures == [None, None]


def import_path(function: Callable[..., Any]) -> str:
    """Return the import path `module:name` by which other processes find a function.

    Raises:
        ConfigError: They can't: it isn't at the top of a module, or of a script below the current folder, or its name
            there is another function's.
    """
    name = getattr(function, "__qualname__", None)
    if name is None or not name.isidentifier():
        raise ConfigError(
            f"reward {function!r} is not a function defined by `def` at the top of a script or module, from which "
            "the reward processes could import it"
        )
    found = getattr(sys.modules.get(function.__module__), name, None)
    if found is not function and not _is_reloaded(found, function):
        raise ConfigError(
            f"reward {function!r} is not what {name} is in {function.__module__}, which the reward processes would "
            "import, such as a decorated function under another name; give it a name of its own at the top of the "
            "module, or decorate it there with @; or import it again, if the module has been loaded again"
        )
    if (module := function.__module__) != "__main__":
        return f"{module}:{name}"
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:  # python -m folder.script
        return f"{spec.name}:{name}"
    if (file := getattr(main, "__file__", None)) is None:
        raise ConfigError(f"reward {name} is defined in a notebook or a shell; put it into a file, and import it")
    script = Path(file).resolve()
    parts = script.relative_to(Path.cwd()).with_suffix("").parts if script.is_relative_to(Path.cwd()) else ()
    if not parts or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"reward {name} is defined in {script}, which the reward processes can't import as a module from the "
            f"current folder {Path.cwd()}; start the script in its folder, under a name that is an identifier"
        )
    return f"{'.'.join(parts)}:{name}"


def _run_to_end(call: str, start: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run what a call starts in an event loop of its own; `call` names it in errors."""
    _require_program(call)  # the loop may be that of a run which imports this script
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(start())
    raise ConfigError(f"an event loop is running, as in a notebook; write `await {call}_async(...)` instead")


def _values_of(config: Mapping[str, Any] | str | Path) -> tuple[dict[str, Any], str]:
    """Return the values of a config, and how errors name it."""
    return (dict(config), "config") if isinstance(config, Mapping) else (read_toml(Path(config)), str(config))


def _require_program(call: str) -> None:
    """Refuse a script that is imported for its reward, here or in a reward process, and another run in this process."""
    if (module := imported_now()) is not None:
        raise ConfigError(
            f'{call} is called while {module} is imported; call it under `if __name__ == "__main__":`, as reward '
            "processes import the script, too"
        )
    if _active:  # Prefect's and Ray's connections are the process's
        raise ConfigError(f"this process runs {_active[0]} already; wait for its end")


@contextmanager
def _only_run(call: str, id_: str) -> Iterator[None]:
    _require_program(call)
    require_own()
    _active.append(id_)
    try:
        yield
    finally:
        disconnect()  # else Ray would end the process, such as a notebook's, after a `sluice down`
        _active.clear()
