"""The command that `sluice bench driver` runs in a process of its own."""

import tempfile
from pathlib import Path
from typing import Annotated

import ray
import typer

from benchmarks.command import benchmark_session, print_report
from benchmarks.driver.report import render
from benchmarks.driver.run import Plan, measure

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

OBJECT_STORE_BYTES = 2**29


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, on the last line.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Policy ranks.")] = Plan.ranks,
    rows: Annotated[int, typer.Option(min=8, help="Rows per step; rounded down to whole groups of 8.")] = Plan.rows,
    steps: Annotated[int, typer.Option(min=1, help="Steps; the figures are those of the median one.")] = Plan.steps,
) -> None:
    """Measure the driver's own work in a step: its rollout, put, plans, dispatch, index requests and records."""
    with benchmark_session(), tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        # A Ray of its own, on loopback: for the object store and the actor of the store's index.
        local = {"_node_ip_address": "127.0.0.1", "include_dashboard": False, "log_to_driver": False}
        ray.init("local", num_cpus=1, object_store_memory=OBJECT_STORE_BYTES, namespace="sluice", **local)
        try:
            report = measure(Plan(ranks, rows, steps), Path(folder))
        finally:
            ray.shutdown()
    print_report(report, as_json, render)


if __name__ == "__main__":
    app()
