"""The commands around services: local ones, and deployments for the Prefect UI. See `commands` for their imports."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.commands import RunArgument, RunsDirOption, app, console
from schemas.config import DEFAULT_RUNS_DIR
from schemas.errors import ConfigError

ConfigsArgument = Annotated[
    list[str], typer.Argument(help="TOML files, or names of built-in ones.", metavar="CONFIG...")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="A change to every config, KEY=VALUE; may be repeated.")
]
CronOption = Annotated[
    str | None,
    typer.Option(help="Start a run of each config by this schedule, e.g. '0 2 * * *' for every night at two."),
]
AddressOption = Annotated[
    str | None, typer.Option(help="The Ray cluster, as services.ray_address; default: the run's, else the local one.")
]
ServicesDirOption = Annotated[str, typer.Option(help="Folder with the local services' state.")]
TimezoneOption = Annotated[str, typer.Option(help="The schedule's time zone, e.g. Europe/Berlin.")]
OverlapOption = Annotated[
    bool, typer.Option("--overlap/--no-overlap", help="Whether a run of a config may be started while one runs.")
]


engine = typer.Typer(no_args_is_help=True, help="Environments of rollout engines.")
app.add_typer(engine, name="engine")


@engine.command("install")
def install_engine(
    name: Annotated[str, typer.Argument(help="vllm.", metavar="ENGINE")],
    cpu: Annotated[bool, typer.Option("--cpu", help="Its build for CPUs.")] = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="Its build for CUDA.")] = False,
    folder: Annotated[Path, typer.Option(help="The virtual environment.")] = Path("vllm-venv"),
    version: Annotated[
        str | None, typer.Option(help="Its version; default: the newest that Sluice works with.")
    ] = None,
    wheels: Annotated[Path | None, typer.Option(help="A folder of wheels to install from, without a network.")] = None,
) -> None:
    """Install an engine into a virtual environment of its own, for rollout.python."""
    from infra.engines.vllm.installation import install_vllm

    if name != "vllm":
        raise ConfigError(f"there is no engine {name!r} to install; use vllm (the default engine needs nothing)")
    if cpu == cuda:
        raise ConfigError("for which device? sluice engine install vllm --cpu, or --cuda")
    install_vllm(
        partial(console.print, markup=False, highlight=False), folder, "cpu" if cpu else "cuda", version, wheels
    )


@app.command()
def serve(
    configs: ConfigsArgument,
    overrides: SetOption = None,
    cron: CronOption = None,
    timezone: TimezoneOption = "UTC",
    overlap: OverlapOption = True,
    limit: Annotated[int, typer.Option(help="Flow runs at the same time; runs of one GPU pool take turns.", min=1)] = 8,
) -> None:
    """Offer configs as deployments in the Prefect UI, and run on this machine what is started there or scheduled."""
    from flows.cli.deployments import Request, serve

    serve(console, Request(configs, overrides or [], cron, timezone, overlap), limit)


@app.command()
def deploy(
    configs: ConfigsArgument,
    pool: Annotated[str, typer.Option(help="The work pool, whose workers start the runs.")],
    overrides: SetOption = None,
    cron: CronOption = None,
    timezone: TimezoneOption = "UTC",
    overlap: OverlapOption = True,
    image: Annotated[str | None, typer.Option(help="The image, for a docker or kubernetes work pool.")] = None,
    notify: Annotated[
        str | None, typer.Option(help="A notification block for stalled and failed runs, TYPE/NAME.")
    ] = None,
    stalled_minutes: Annotated[
        float, typer.Option(help="Minutes without a finished step after which a run is stalled.", min=0.2)
    ] = 30,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Evaluate the newest checkpoint after each one.")
    ] = False,
    export_to: Annotated[
        str | None, typer.Option(help="Export each checkpoint that is kept until then under this folder.")
    ] = None,
) -> None:
    """Create deployments of configs in a Prefect work pool; crashed runs are resumed, collapsed ones suspended."""
    from flows.cli.deployments import Reactions, Request, deploy

    request = Request(configs, overrides or [], cron, timezone, overlap)
    deploy(console, request, pool, image, Reactions(notify, stalled_minutes, evaluate, export_to))


@app.command()
def ps(
    address: AddressOption = None,
    services_dir: ServicesDirOption = ".sluice",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> None:
    """List the runs that have processes in the Ray cluster, whoever started them, with what they hold."""
    from flows.cli.cluster import print_cluster_runs

    print_cluster_runs(console, address, services_dir, as_json=as_json)


@app.command()
def stop(
    run: RunArgument,
    address: AddressOption = None,
    services_dir: ServicesDirOption = ".sluice",
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Stop a run: its driver, its workers and its store end, and their GPUs and memory are free; it can be resumed."""
    from flows.cli.cluster import stop_run

    stop_run(console, run, runs_dir, address, services_dir)


@app.command()
def down(services_dir: ServicesDirOption = ".sluice") -> None:
    """Stop the local Prefect server and Ray that earlier commands started here, and free the memory of dead runs."""
    from infra.services.local import LocalServices
    from infra.storage.shared_memory import remove_left_over

    stopped = LocalServices(Path(services_dir)).stop()
    remove_left_over()
    console.print(f"stopped: {', '.join(stopped)}" if stopped else "no local service was running")
