"""The benchmark of the driver runs its stages against fake workers; no time is asserted."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.driver.report import render
from benchmarks.driver.run import Plan, measure

PARTS = ["lease", "rollout", "ledger", "put", "score", "advantage", "update", "publish", "metrics", "clear"]


@pytest.mark.slow
def test_the_benchmark_runs_steps_against_fake_workers(ray_cluster: Any, tmp_path: Path) -> None:
    report = measure(Plan(ranks=5, rows=1300, steps=2), tmp_path)
    assert (report["ranks"], report["rows"], report["steps"]) == (5, 1296, 2)
    assert list(report["parts"]) == PARTS
    assert report["driver_seconds"] in report["seconds_by_step"]
    assert report["driver_seconds"] == pytest.approx(
        sum(part["cpu_seconds"] for part in report["parts"].values()), abs=0.01
    )
    assert report["peak_bytes"] > 2**20
    # One rollout worker: it is started for the rollout, for the put and to be published to. Three shards are
    # generated and put. The ranks are looked up for each of two calls.
    assert report["calls"] == 3 * 1 + 1 + 3 * 2 + 2 * 2 * 5
    # The batch and the plans are in the object store: no call carries them.
    assert report["argument_bytes"] < 200 * report["calls"]


def test_the_figures_as_a_table() -> None:
    part = {"cpu_seconds": 0.25, "wall_seconds": 0.5}
    report = {"ranks": 8, "rows": 1000, "parts": {"score": part}, "driver_seconds": 0.25}
    report |= {"wall_seconds": 0.5, "peak_bytes": 2**29, "calls": 1200, "argument_bytes": 2**20}
    console = Console(width=120, file=io.StringIO())
    console.print(render(report))
    text = console.file.getvalue()
    assert "1,000 rows and 8 ranks" in text
    assert "250" in text
    assert "0.25 s of processor time, 0.50 s of wall-clock time, 0.50 GiB" in text
    assert "1,200 calls of workers with 1.0 MiB of arguments" in text
