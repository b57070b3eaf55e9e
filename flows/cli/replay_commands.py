"""The commands that go back to an earlier step of a run. See `commands` for their imports."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.commands import OverridesArgument, RunArgument, RunsDirOption, app, console
from flows.cli.history_commands import JsonOption
from schemas.config import DEFAULT_RUNS_DIR

WithinOption = Annotated[bool, typer.Option("--within", help="Accept numbers that differ by at most 1e-6 as the same.")]


@app.command()
def replay(
    run: RunArgument,
    steps: Annotated[str, typer.Option(help="A step, or steps A:B without B, counted from 0.")],
    overrides: OverridesArgument = None,
    rewards: Annotated[
        bool, typer.Option("--rewards", help="Compute the rewards again, e.g. by changed code.")
    ] = False,
    tolerance: WithinOption = False,
    as_json: JsonOption = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Compute steps again from a run's stored columns: the same bits (else exit code 1), or with changed settings.

    Nothing is generated. Settings of reward, advantage, overlong, kl, correction, loss and optim may change, e.g.
    advantage.kind=rloo; a report then says what changes against what the run did.
    """
    from flows.cli.replay import run_replay
    from infra.storage.runs import RunDirectory

    accepted = run_replay(
        console,
        RunDirectory.open(run, runs_dir),
        steps,
        overrides or [],
        "within 1e-6" if tolerance else "same bits",
        rescores=rewards,
        as_json=as_json,
    )
    if not accepted:
        raise typer.Exit(1)


@app.command()
def fork(
    run: RunArgument,
    at: Annotated[int, typer.Option(help="How many of the run's steps the fork has: 7 begins with step 7.", min=0)],
    overrides: OverridesArgument = None,
    run_id: Annotated[str | None, typer.Option(help="The fork's id; default: RUN-at-STEP.")] = None,
    note: Annotated[str | None, typer.Option(help="The fork's note.")] = None,
    start: Annotated[bool, typer.Option("--start", help="Go on with it at once, as sluice resume does.")] = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Make a run that has another one's weights, optimizer and metrics of an earlier step, with changed settings.

    Nothing is generated: from the newest checkpoint before it, the step's weights are computed again.
    """
    from flows.cli.commands import resume
    from flows.preflight import check, check_checkpoint
    from flows.replay.fork import make_fork, plan_fork
    from infra.storage.runs import RunDirectory

    parent = RunDirectory.open(run, runs_dir)
    planned = plan_fork(parent, at, run_id, note, overrides or [])
    with console.status("checking model, data and reward"):
        check(planned.config)
        check_checkpoint(parent, planned.config)
    with console.status("forking"):
        make_fork(planned)
    directory = planned.directory
    parts = f"{planned.num_replayed} updates repeated" if planned.num_replayed else "nothing to repeat"
    console.print(f"made run {directory.run_id} from {planned.lineage}: {parts}", soft_wrap=True, highlight=False)
    if planned.order_note:
        console.print(planned.order_note, soft_wrap=True, highlight=False)
    if start:
        resume(directory.url)
    else:
        console.print(f"go on with: sluice resume {directory.argument}", soft_wrap=True, highlight=False)


@app.command()
def tournament(
    run: RunArgument,
    methods: Annotated[
        list[str],
        typer.Argument(
            help="A built-in config, for its advantage, loss and kl; or changes: slow:optim.lr=1e-7,loss.kind=cispo",
            metavar="METHOD...",
        ),
    ],
    steps: Annotated[
        str | None, typer.Option(help="Compare on steps A:B without B; default: the last kept ones, at most 4.")
    ] = None,
    forks: Annotated[bool, typer.Option("--forks/--no-forks", help="Also train forks.")] = True,
    at: Annotated[
        int | None, typer.Option(help="How many of the run's steps the forks have; default: as many as can be.", min=0)
    ] = None,
    fork_steps: Annotated[
        int | None, typer.Option(help="Steps of the forks' first round, doubled in each; default: 10.", min=1)
    ] = None,
    name: Annotated[str, typer.Option(help="Begins the forks' ids, RUN-NAME-METHOD, and names the page.")] = "t",
    as_json: JsonOption = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Compare methods with a run's own: their updates of the same stored steps, then forks, half of which go on.

    Each round ranks the forks by held-out accuracy, else reward. The same command goes on after an interruption.
    """
    from flows.cli.tournament import run_tournament
    from infra.storage.runs import RunDirectory

    run_tournament(
        console,
        RunDirectory.open(run, runs_dir),
        methods,
        name=name,
        steps=steps,
        at=at,
        fork_steps=fork_steps,
        forks=forks,
        as_json=as_json,
    )


@app.command()
def bundle(
    run: RunArgument,
    step: Annotated[int, typer.Argument(help="The step, counted from 0.", metavar="STEP", min=0)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    redact: Annotated[bool, typer.Option("--redact", help="Leave texts out; tokens stay.")] = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Write one file with all that a step can be reproduced from on another machine, weights and model included."""
    from flows.replay.bundle import write_bundle
    from infra.storage.runs import RunDirectory

    with console.status("bundling"):
        written = write_bundle(RunDirectory.open(run, runs_dir), step, out, is_redacted=redact)
    num_bytes = sum(entry.num_bytes for entry in written.files.values())
    console.print(
        f"wrote {len(written.files)} files with {num_bytes:,} bytes to {out}", soft_wrap=True, highlight=False
    )


@app.command()
def reproduce(
    file: Annotated[Path, typer.Argument(help="A bundle.", metavar="FILE")],
    overrides: OverridesArgument = None,
    tolerance: WithinOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compute the step of a bundle again: exit code 0 if it has the same bits, else 1; says which packages differ.

    Where it is computed may change, e.g. runtime.num_policy_ranks=1 runtime.device=cpu.
    """
    from flows.cli.replay import run_reproduction

    if not run_reproduction(
        console, file, overrides or [], "within 1e-6" if tolerance else "same bits", as_json=as_json
    ):
        raise typer.Exit(1)
