"""The commands and their options. Each command imports what it needs when called, so that `--help` is fast."""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from flows.configs import find_config
from schemas.config import DEFAULT_RUNS_DIR
from schemas.errors import RunError

if TYPE_CHECKING:
    from schemas.config.run import RunConfig

DISTRIBUTION = "sluice-rl"
CHECKOUT = Path(__file__).parents[2]

app = typer.Typer(
    name="sluice",
    help="Post-train language models with GRPO, as Prefect flows over a jagged column store.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()

RunArgument = Annotated[str, typer.Argument(help="The run's id, directory or URL.", metavar="RUN")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to the config, e.g. optim.lr=1e-4 rollout.num_prompts=32", metavar="[KEY=VALUE]..."),
]
RunsDirOption = Annotated[str, typer.Option(help="The folder or URL that holds the runs.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"sluice {version(DISTRIBUTION)}", highlight=False)
        raise typer.Exit


@app.callback()
def sluice(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Post-train language models with GRPO, as Prefect flows over a jagged column store."""


@app.command()
def demo(
    overrides: OverridesArgument = None,
    config_name: Annotated[
        Literal["demo", "demo_vllm"],
        typer.Option("--config", help="The built-in config; demo_vllm generates with vLLM."),
    ] = "demo",
    steps: Annotated[int | None, typer.Option(help="GRPO steps; default: the config's.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed for data, model and training.", min=0)] = 0,
    tiny: Annotated[bool, typer.Option("--tiny", help="2 steps of SFT and 2 of GRPO, which learn nothing.")] = False,
) -> None:
    """Generate a data set and a tiny model, fine-tune the model on demonstrations, and improve it with GRPO."""
    from concurrent.futures import ThreadPoolExecutor

    from flows.cli import demo as demo_inputs
    from flows.cli.run import run_training
    from flows.lifecycle.session import prefect_session

    last = [f"steps={steps}"] if steps else []
    config = _load(config_name, [*demo_inputs.demo_overrides(seed, tiny), *(overrides or []), *last])
    if config.rollout.kind == "vllm":
        from infra.engines.vllm.installation import find_vllm

        find_vllm(config.rollout.python)  # fail now, not after supervised fine-tuning
    sft = _load("demo_sft", demo_inputs.sft_overrides(seed, tiny))
    made = demo_inputs.demo_folder(seed, tiny), sft, demo_inputs.TINY if tiny else demo_inputs.RECIPE
    is_made = demo_inputs.is_made(*made)
    with ThreadPoolExecutor(1) as thread:  # the services start meanwhile
        inputs = None if is_made else thread.submit(demo_inputs.make_inputs, *made)
        try:
            with prefect_session(config.services, console):
                if inputs is not None:
                    inputs.result()
                    demo_inputs.prepare(console, config, *made)
                run_training(console, config)
        finally:
            if inputs is not None and not inputs.done():
                console.print("ending, once the demo's files are written")


@app.command()
def train(
    config_path: Annotated[str, typer.Argument(help="A TOML file, or the name of a built-in one.", metavar="CONFIG")],
    overrides: OverridesArgument = None,
    run_id: Annotated[str | None, typer.Option(help="The run's id; default: from the config's name.")] = None,
    resumes: Annotated[bool, typer.Option("--resume", help="Resume the run of this id, if there is one.")] = False,
) -> None:
    """Train with a config; everything is checked before anything is started."""
    from flows.cli.run import run_training
    from flows.lifecycle.secrets import take_secrets
    from flows.lifecycle.session import prefect_session
    from flows.preflight import check_run
    from infra.storage.runs import RunDirectory
    from schemas.errors import UserError

    if resumes and not run_id:
        raise UserError("--resume goes with --run-id; a run of any id is resumed by: sluice resume RUN")
    config = _load(config_path, overrides or [])
    take_secrets(config.services, starts=True)
    if run_id and resumes and (found := RunDirectory.at(config, run_id)).exists:
        resume(found.url, overrides)
        return
    if run_id:
        RunDirectory.require_absent(config, run_id)
    with console.status("checking model, data and reward"):
        check_run(config)
    with prefect_session(config.services, console):
        run_training(console, config, run_id)


@app.command()
def pipeline(
    path: Annotated[str, typer.Argument(help="A TOML file with stages.", metavar="FILE")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes to the file, e.g. stages.grpo.set.optim.lr=1e-4", metavar="[KEY=VALUE]..."),
    ] = None,
    pipeline_id: Annotated[
        str | None, typer.Option("--id", help="The pipeline's id; one that exists goes on. Default: name and time.")
    ] = None,
) -> None:
    """Run stages that start from each other's models, and promote the last model if it passes the gate."""
    import shlex

    from flows.cli.run import run_pipeline
    from flows.lifecycle.secrets import take_secrets
    from flows.lifecycle.session import prefect_session
    from flows.pipeline_plan import check_pipeline, load_pipeline, plan_pipeline
    from infra.storage.runs import new_run_id

    config = load_pipeline(path, overrides or [])
    plan = plan_pipeline(config, pipeline_id or new_run_id(config.name))
    take_secrets(plan.services, starts=True)
    with console.status("checking models, data and rewards of all stages"):
        check_pipeline(plan)
    command = shlex.join(["sluice", "pipeline", path, *(overrides or []), "--id", plan.pipeline_id])
    with prefect_session(plan.services, console):
        run_pipeline(console, plan, command)


@app.command()
def init(
    model: Annotated[str, typer.Option(help="A Hugging Face model folder with a chat template.")],
    data: Annotated[str, typer.Option(help="A file of prompts and answers.")],
    reward: Annotated[
        str | None,
        typer.Option(help="numeric, exact, math, or module:function; default: numeric if all answers are numbers."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("run.toml"),
) -> None:
    """Write a commented config of one screen for a model and its data."""
    from flows.cli.init import write_config

    write_config(console, model, data, reward, out)


@app.command()
def plan(
    config_path: Annotated[str, typer.Argument(help="A TOML file, or the name of a built-in one.", metavar="CONFIG")],
    overrides: OverridesArgument = None,
    fill: Annotated[
        float, typer.Option(help="Mean response length / rollout.max_response_tokens; 1: all at their longest.")
    ] = 0.5,
    cluster: Annotated[
        str | None, typer.Option(help="Plan for other hardware: GPUSxKIND or NODESxGPUSxKIND, e.g. 8xH100, 2x8xH100.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> None:
    """Plan one step without starting anything: rows, micro-batches, memory; if it can't fit, say what to change."""
    from flows.cli.plan import plan_config

    plan_config(console, _load(config_path, overrides or []), fill=fill, cluster=cluster, as_json=as_json)


@app.command()
def resume(run: RunArgument, overrides: OverridesArgument = None, runs_dir: RunsDirOption = DEFAULT_RUNS_DIR) -> None:
    """Resume a run that was stopped or killed; finished stages are not repeated.

    Settings that don't affect what is trained may change, e.g. runtime.num_policy_ranks=2 or steps=100.
    """
    from flows.cli.run import run_training
    from flows.lifecycle.secrets import take_secrets
    from flows.lifecycle.session import prefect_session
    from flows.preflight import check_start
    from flows.summary import finished_summary
    from infra.storage.runs import RunDirectory
    from schemas.config.load import override_config

    directory = RunDirectory.open(run, runs_dir)
    config = override_config(directory.config(), overrides or [], directory.run_id)
    take_secrets(config.services, starts=True)
    # A run that was given by its path may have been moved.
    if RunDirectory.at(config, directory.run_id).url != directory.url:
        config = config.replace(runtime=config.runtime.replace(runs_dir=directory.runs_dir))
    directory.ledger.is_outdated()  # raises if a newer Sluice wrote it
    if (finished := finished_summary(config, directory.run_id)) is not None:
        console.print(
            f"run {directory.run_id} is complete: {finished.steps} of {config.steps} steps; nothing to resume"
        )
        return
    config = check_start(config, directory)
    done = directory.metrics.num_steps()
    console.print(f"resuming {directory.run_id}: {done} of {config.steps} steps are done")
    with prefect_session(config.services, console):
        run_training(console, config, directory.run_id)


@app.command()
def data(
    task: Annotated[str, typer.Argument(help="A reasoning-gym task, e.g. chain_sum.")],
    out: Annotated[Path, typer.Argument(help="The file to write, .parquet or .jsonl.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="The task's own settings, e.g. min_terms=2", metavar="[KEY=VALUE]..."),
    ] = None,
    size: Annotated[int, typer.Option(help="Number of problems.", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="The task's seed.", min=0)] = 0,
    exclude: Annotated[Path | None, typer.Option(help="Skip problems that are in this file.")] = None,
) -> None:
    """Write problems of a reasoning-gym task, as Parquet or JSONL with verl's columns."""
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
    data_path: Annotated[str | None, typer.Option("--data", help="Prompt file; default: the run's eval file.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Maximum number of prompts.", min=1)] = None,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Measure the held-out accuracy of a run's newest checkpoint, by data source.

    Changes to the config apply to this evaluation only, e.g. eval.samples_per_prompt=8 eval.temperature=1.0.
    """
    from flows.evaluate import evaluate_run
    from flows.ui.progress import eval_lines
    from infra.storage.runs import RunDirectory

    with console.status("generating"):
        report = evaluate_run(RunDirectory.open(run, runs_dir), data_path, num_prompts, overrides or [])
    if report.loss is not None:
        console.print(f"policy version {report.policy_version}: {report}, {report.num_prompts} rows", highlight=False)
        return
    console.print(
        f"policy version {report.policy_version}: accuracy {report.accuracy:.3f}, mean reward {report.reward:.3f} "
        f"over {report.num_prompts} prompts ({report.num_failed} rewards failed) in {report.seconds:.1f} s"
    )
    for line in eval_lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(help="The folder to write; must be empty or not exist.", metavar="OUT")],
    step: Annotated[
        int | None, typer.Option(help="Checkpoint after this many steps; default: the newest.", min=0)
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Checkpoint with the best held-out accuracy.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the base model's.")] = None,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Write a checkpoint, adapters merged, as a Hugging Face folder that transformers and vLLM can load."""
    from flows.export import export_run
    from infra.storage.runs import RunDirectory

    with console.status("exporting"):
        version = export_run(RunDirectory.open(run, runs_dir), out, version=step, best=best, dtype=dtype)
    console.print(f"wrote policy version {version} to {out}", soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(help="The run's id, directory or URL.", metavar="RUN")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in the run.")] = None,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Show a run's metrics, and write a page with its curves, timeline and rows."""
    from flows.cli.report import write_page
    from schemas.errors import UserError

    if len(runs) > 1:
        raise UserError(f"sluice report takes one run; to compare two: sluice diff {runs[0]} {runs[1]}")
    write_page(console, runs[0], runs_dir, out)


@app.command()
def runs(
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> None:
    """List the runs: whether they are running, finished or stopped, and how far they have come."""
    from flows.cli.report import print_runs

    print_runs(console, runs_dir, as_json=as_json)


@app.command()
def inspect(
    run: RunArgument,
    step: Annotated[
        int | None,
        typer.Argument(help="Counted from 0, as in folder names; default: the newest with columns.", metavar="[STEP]"),
    ] = None,
    rows: Annotated[int, typer.Option(help="Number of sample rows.", min=0)] = 3,
    failed: Annotated[
        bool, typer.Option("--failed", help="Show the rows whose reward failed, which are not trained on.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value, with full strings.")] = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Show a step's columns, without Ray: statistics, chunks, lengths and sample rows."""
    from flows.cli.inspect import print_step
    from infra.storage.runs import RunDirectory
    from infra.stores.offline import find_step, open_run_columns
    from infra.stores.summary import summarize_step

    directory = RunDirectory.open(run, runs_dir)
    store = open_run_columns(directory)
    step = find_step(directory, store, step)
    reasons = store.owner(step).failures.load(step) if failed else None
    summary, failures = summarize_step(store, step, rows, failed=failed, reasons=reasons)
    if as_json:
        typer.echo(summary.model_dump_json(indent=2))
    else:
        print_step(console, summary, None if failed else store.owner(summary.step).plans.load(summary.step))
    if failures:
        raise failures[0]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="The benchmark; default: list all.")] = None,
) -> None:
    """Measure Sluice against baselines, from a checkout with the extra `bench`; each benchmark has its own options."""
    if not (CHECKOUT / "benchmarks").exists():
        raise RunError(
            f"benchmarks need a checkout and the extra `bench`: {CHECKOUT} has none; clone the repository and "
            "install it with: pip install -e '.[bench]'"
        )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])}
    arguments = [*([name] if name else []), *context.args] or ["--help"]  # which lists them
    # In a fresh process, as a benchmark sets what Ray and torch read on import; in place of this one, so that
    # terminating the command terminates the benchmark.
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", "benchmarks", *arguments], environment)


def _load(config: str, overrides: list[str]) -> "RunConfig":
    from schemas.config.load import load_config

    return load_config(find_config(config), overrides)
