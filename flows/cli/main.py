"""The `sluice` command."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console

from flows.cli.bench import app as bench_app
from flows.cli.installation import explain_import_error
from schemas.config.load import load_config, override_config
from schemas.config.run import RunConfig
from schemas.errors import PipelineError, RunError, UserError

USER_ERROR, PIPELINE_ERROR, TERMINATED = 2, 1, 128 + signal.SIGTERM
CONFIGS = Path(__file__).parents[1] / "configs"

app = typer.Typer(
    name="sluice",
    help="Post-train language models with GRPO, as Prefect flows over a jagged column store.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(bench_app)
console = Console()
errors = Console(stderr=True)

RunArgument = Annotated[str, typer.Argument(help="A run's id, or its directory.", metavar="RUN")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to the config, e.g. optim.lr=1e-4 rollout.num_prompts=32", metavar="[KEY=VALUE]..."),
]
RunsDirOption = Annotated[str, typer.Option(help="Where runs lie.")]


def main() -> None:
    """Entry point: one clear line for what a user can mend, a resume line for what stopped a run."""
    sys.path.insert(0, os.getcwd())  # reward functions may lie beside the config
    try:
        app()
    except UserError as error:
        _refuse(error)
    except ImportError as error:
        if (reason := explain_import_error(error)) is None:
            raise
        _refuse(reason)
    except PipelineError as error:
        errors.print(
            f"stopped: {type(error).__name__}: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(PIPELINE_ERROR)


def _refuse(error: UserError) -> NoReturn:
    errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(USER_ERROR)


@app.command()
def demo(
    overrides: OverridesArgument = None,
    config_name: Annotated[
        Literal["demo", "demo_vllm"], typer.Option("--config", help="The built-in config; demo_vllm: rollouts by vLLM.")
    ] = "demo",
    steps: Annotated[int | None, typer.Option(help="GRPO steps; the config's own if not given.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of data, model and training.", min=0)] = 0,
) -> None:
    """Make a data set and a tiny model, warm-start it, and run GRPO until the reward has risen."""
    from flows.cli.demo import demo_overrides, prepare_demo
    from flows.cli.session import prefect_session, run_flow

    last = [f"steps={steps}"] if steps else []
    config = _load(config_name, [*demo_overrides(seed), *(overrides or []), *last])
    if config.rollout.kind == "vllm":
        from infra.engines.vllm.package import require_vllm

        require_vllm()  # rather than after the warm start
    with prefect_session(config.runtime, console):
        run_flow(prepare_demo(config))
        _train(config, None)


@app.command()
def train(
    config_path: Annotated[str, typer.Argument(help="A TOML file, or the name of a built-in one.", metavar="CONFIG")],
    overrides: OverridesArgument = None,
    run_id: Annotated[str | None, typer.Option(help="The run's name; made from the config's if not given.")] = None,
) -> None:
    """Train as the config says. Everything is checked before anything starts."""
    from flows.cli.preflight import check
    from flows.cli.session import prefect_session

    config = _load(config_path, overrides or [])
    with console.status("checking model, data and reward"):
        check(config)
    with prefect_session(config.runtime, console):
        _train(config, run_id)


@app.command()
def plan(
    config_path: Annotated[str, typer.Argument(help="A TOML file, or the name of a built-in one.", metavar="CONFIG")],
    overrides: OverridesArgument = None,
    lengths: Annotated[
        Literal["lognormal", "uniform"], typer.Option(help="How response lengths are drawn.")
    ] = "lognormal",
    fill: Annotated[
        float, typer.Option(help="Their mean, as a share of rollout.max_response_tokens; 1 is full.")
    ] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value, for machines.")] = False,
) -> None:
    """Show what one step would take, and refuse what can't fit. Nothing is started."""
    from flows.cli.plan import plan_config

    plan_config(console, _load(config_path, overrides or []), shape=lengths, fill=fill, as_json=as_json)


@app.command()
def resume(run: RunArgument, overrides: OverridesArgument = None, runs_dir: RunsDirOption = "runs") -> None:
    """Go on with a run that was stopped or killed; finished stages are not repeated.

    What doesn't change what is trained may be changed, e.g. runtime.num_policy_ranks=2 or steps=100.
    """
    from flows.cli.preflight import check, check_checkpoint
    from flows.cli.session import prefect_session
    from infra.storage.config_changes import check_changes
    from infra.storage.runs import RunDirectory

    directory = RunDirectory.open(run, runs_dir)
    config = override_config(directory.config(), overrides or [], directory.run_id)
    if Path(config.runtime.runs_dir).resolve() != directory.path.parent:  # found by its path, it may have been moved
        config = config.replace(runtime=config.runtime.replace(runs_dir=str(directory.path.parent)))
    check_changes(directory, config)
    done = len(directory.metrics.steps())
    if done >= config.steps and (directory.path / "summary.json").exists():
        console.print(f"run {directory.run_id} is complete: {done} of {config.steps} steps; nothing to resume")
        return
    check(config)
    check_checkpoint(directory, config)
    console.print(f"resuming {directory.run_id}: {done} of {config.steps} steps are done")
    with prefect_session(config.runtime, console):
        _train(config, directory.run_id, resume=True)


@app.command()
def data(
    task: Annotated[str, typer.Argument(help="A reasoning-gym task, e.g. chain_sum.")],
    out: Annotated[Path, typer.Argument(help="The Parquet file to write.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="The task's own settings, e.g. min_terms=2", metavar="[KEY=VALUE]..."),
    ] = None,
    size: Annotated[int, typer.Option(help="Rows.", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="The task's seed.", min=0)] = 0,
    exclude: Annotated[Path | None, typer.Option(help="Leave out the problems that this Parquet file holds.")] = None,
) -> None:
    """Write problems of a reasoning-gym task as Parquet, in the columns that verl uses."""
    from infra.datasets.reasoning_gym import parse_settings, write_problems

    with console.status(f"generating {size} problems of {task}"):
        num_rows = write_problems(
            out, task, size=size, seed=seed, settings=parse_settings(settings or []), exclude=exclude
        )
    console.print(f"wrote {num_rows} rows of {task} to {out}")


@app.command(name="eval")
def evaluate(
    run: RunArgument,
    overrides: OverridesArgument = None,
    data_path: Annotated[
        str | None, typer.Option("--data", help="Prompts; the run's own eval file if not given.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="At most so many prompts.", min=1)] = None,
    runs_dir: RunsDirOption = "runs",
) -> None:
    """Measure the held-out accuracy of a run's newest checkpoint, by data source.

    Changes to the config hold for this evaluation only, e.g. eval.samples_per_prompt=8 eval.temperature=1.0.
    """
    from flows.cli.evaluate import evaluate_run
    from flows.progress import eval_lines
    from infra.storage.runs import RunDirectory

    with console.status("generating"):
        report = evaluate_run(RunDirectory.open(run, runs_dir), data_path, num_prompts, overrides or [])
    console.print(
        f"policy version {report.policy_version}: accuracy {report.accuracy:.3f}, mean reward {report.reward:.3f} "
        f"over {report.num_prompts} prompts ({report.num_failed} rewards failed) in {report.seconds:.1f} s"
    )
    for line in eval_lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(help="The folder to write; empty or not there.", metavar="OUT")],
    step: Annotated[
        int | None, typer.Option(help="The checkpoint after so many steps; else the newest.", min=0)
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The one with the best held-out accuracy.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the base model's own if not given.")
    ] = None,
    runs_dir: RunsDirOption = "runs",
) -> None:
    """Write a checkpoint as a Hugging Face folder, adapters merged, which transformers and vLLM load."""
    from flows.cli.export import export_run
    from infra.storage.runs import RunDirectory

    with console.status("exporting"):
        version = export_run(RunDirectory.open(run, runs_dir), out, version=step, best=best, dtype=dtype)
    console.print(f"wrote policy version {version} to {out}", soft_wrap=True)


@app.command()
def report(run: RunArgument, runs_dir: RunsDirOption = "runs") -> None:
    """Show a run's figures and write them, with curves, to its report.html."""
    from flows.cli.report import render_table, write_html
    from infra.storage.runs import RunDirectory

    directory = RunDirectory.open(run, runs_dir)
    if not directory.metrics.steps():
        raise RunError(f"run {directory.run_id} has no finished step to report; resume with: sluice resume {run}")
    console.print(render_table(directory))
    console.print(f"wrote {write_html(directory)}", soft_wrap=True)


@app.command()
def inspect(
    run: RunArgument,
    step: Annotated[
        int | None,
        typer.Argument(
            help="Counted from 0, as in folder names; the newest with columns if not given.", metavar="[STEP]"
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="Sample rows.", min=0)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value, with whole texts, for machines.")] = False,
    runs_dir: RunsDirOption = "runs",
) -> None:
    """Show what a step's columns hold, without Ray: figures, chunks, lengths and sample rows."""
    from flows.cli.inspect import print_step
    from infra.storage.runs import RunDirectory
    from infra.stores.offline import find_step, open_run_columns
    from infra.stores.summary import summarize_step

    directory = RunDirectory.open(run, runs_dir)
    store = open_run_columns(directory)
    summary, failures = summarize_step(store, find_step(directory, store, step), rows)
    if as_json:
        typer.echo(summary.model_dump_json(indent=2))
    else:
        print_step(console, summary, directory.plans.load(summary.step))
    if failures:
        raise failures[0]


@app.command()
def down(
    services_dir: Annotated[str, typer.Option(help="Where the services' state lies.")] = ".sluice",
) -> None:
    """Stop the local Prefect server and Ray that earlier commands started here."""
    from infra.services.local import LocalServices

    stopped = LocalServices(Path(services_dir)).stop()
    console.print(f"stopped: {', '.join(stopped)}" if stopped else "no local service was running")


def _load(config: str, overrides: list[str]) -> RunConfig:
    built_in = CONFIGS / f"{config}.toml"
    return load_config(built_in if built_in.exists() and not Path(config).exists() else Path(config), overrides)


def _train(config: RunConfig, run_id: str | None, *, resume: bool = False) -> None:
    from flows.cli.report import render_summary
    from flows.cli.session import run_flow
    from flows.train import train as train_flow
    from infra.storage.runs import new_run_id

    run_id = run_id or new_run_id(config.name)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        summary = run_flow(train_flow(config, run_id=run_id, resume=resume))
    except BaseException as stopped:
        if (Path(config.runtime.runs_dir) / run_id).exists():
            errors.print(f"resume with: sluice resume {run_id}", markup=False, highlight=False, soft_wrap=True)
        if _was_terminated(stopped):
            raise typer.Exit(TERMINATED) from None
        raise
    console.print(render_summary(summary, Path(config.runtime.runs_dir) / run_id))


class _Terminated(BaseException):
    """A SIGTERM. Prefect takes the signal first, lets the flow clean up, and then sends it on to this command."""


def _terminate(*_: object) -> None:
    raise _Terminated


def _was_terminated(error: BaseException | None) -> bool:
    """Whether a SIGTERM is behind an error: it is raised anywhere, so that another one may cover it."""
    from prefect.exceptions import TerminationSignal

    while error is not None and not isinstance(error, TerminationSignal | _Terminated):
        error = error.__cause__ or error.__context__
    return error is not None


if __name__ == "__main__":
    main()
