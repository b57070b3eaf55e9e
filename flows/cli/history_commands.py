"""The commands that look at the past steps of runs. See `commands` for their imports."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.commands import RunArgument, RunsDirOption, app, console
from schemas.config import DEFAULT_RUNS_DIR

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]


@app.command()
def sql(
    arguments: Annotated[
        list[str],
        typer.Argument(help="Runs' ids or directories, then a query, or its .sql file.", metavar="RUN... QUERY"),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the result: .parquet, .csv, .json, or .html for a chart.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Number of rows to print.", min=1)] = 40,
    as_json: JsonOption = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Ask runs by SQL: views runs, steps, metrics, evals, placements, rows, tokens and prompt_tokens."""
    from flows.cli.query import print_result, write_result
    from infra.history.sql import RunQueries, read_query
    from infra.storage.runs import RunDirectory
    from schemas.errors import QueryError

    *names, query = arguments
    if not names:
        raise QueryError('give at least one run and a query: sluice sql RUN "select count(*) from rows"')
    queries = RunQueries([RunDirectory.open(name, runs_dir) for name in names])
    table = queries.query(read_query(query))
    if out is not None:
        console.print(f"wrote {table.num_rows:,} rows to {write_result(table, out, query)}", soft_wrap=True)
    else:
        print_result(console, table, rows, as_json=as_json)
    if not table.num_rows and (note := queries.missing_steps()):
        typer.echo(f"note: {note}", err=True)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="A run's id, directory or URL.", metavar="A")],
    b: Annotated[str, typer.Argument(help="The run to compare it with.", metavar="B")],
    tolerance: Annotated[
        bool, typer.Option("--within", help="Accept numbers that differ by at most 1e-6 as the same.")
    ] = False,
    all_steps: Annotated[bool, typer.Option("--all", help="Go on after the first step that differs.")] = False,
    as_json: JsonOption = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Find the first step, stage, column, row and token in which two runs differ; exit code 1 if they do."""
    from flows.cli.diff import print_diff
    from infra.storage.runs import RunDirectory

    runs = RunDirectory.open(a, runs_dir), RunDirectory.open(b, runs_dir)
    if not print_diff(
        console, *runs, "within 1e-6" if tolerance else "same bits", all_steps=all_steps, as_json=as_json
    ):
        raise typer.Exit(1)


@app.command()
def gc(
    runs: Annotated[list[str], typer.Argument(help="Runs' ids, directories or URLs.", metavar="RUN...")],
    keep_steps: Annotated[
        int | None, typer.Option(help="Finished steps to keep; default: as store.keep_steps.", min=0)
    ] = None,
    keep_bytes: Annotated[
        int | None, typer.Option(help="Bytes to keep, of the newest steps; default: as store.keep_bytes.", min=0)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Remove the columns of old steps of runs that no driver works on; what a resume needs stays."""
    from infra.history.garbage import collect_garbage
    from infra.storage.runs import RunDirectory

    for directory in [RunDirectory.open(run, runs_dir) for run in runs]:
        found = collect_garbage(directory, keep_steps, keep_bytes, dry_run=dry_run)
        shared = f" ({found.shared_bytes:,} of them not freed: other runs have them, too)" if found.shared_bytes else ""
        console.print(
            f"{found.run_id}: {'would remove' if dry_run else 'removed'} {len(found.steps):,} steps with "
            f"{found.num_bytes:,} bytes{shared}, {'and keep' if dry_run else 'kept'} {found.kept_steps:,} with "
            f"{found.kept_bytes:,} bytes",
            soft_wrap=True,
            highlight=False,
        )


@app.command()
def view(
    run: RunArgument,
    other: Annotated[str | None, typer.Argument(help="A second run, to compare with.", metavar="[RUN2]")] = None,
    step: Annotated[int | None, typer.Option(help="Print the URL of this step, counted from 0.", min=0)] = None,
    row: Annotated[int | None, typer.Option(help="Print the URL of this row of the step.", min=0)] = None,
    host: Annotated[str, typer.Option(help="The address to serve on; others than loopback are not encrypted.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port; 0: any that is free.", min=0, max=65535)] = 0,
    runs_dir: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Serve a local page to look at any token of a run's kept steps, until it is interrupted."""
    from flows.view import serve_view
    from infra.storage.runs import RunDirectory

    directories = [RunDirectory.open(name, runs_dir) for name in (run, other) if name is not None]
    serve_view(console, directories, step, row, host=host, port=port)
