"""The benchmark of whole steps runs them; no time is asserted."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.step.report import render
from benchmarks.step.run import QUICK, measure
from benchmarks.step.workspace import Workspace
from tests.services import Workplace


@pytest.mark.slow
def test_the_benchmark_measures_real_runs(workplace: Workplace) -> None:
    workspace = Workspace(workplace.folder)  # with the services that are there
    report = measure(replace(QUICK, paths=("overlapped",)), workspace)
    path = report["paths"]["overlapped"]
    assert path["staleness"] == 1
    assert path["steps"] == QUICK.steps - 2
    assert path["seconds_per_step"] > 0
    assert 0 < path["data_plane"]["share"] <= path["data_plane"]["max_share"] < 1
    assert path["data_plane"]["first_put_ms"] > 0
    assert path["tokens_per_s"] > 0
    assert {"rollout", "publish", "update"} <= set(path["seconds_by_phase"])
    assert report["speedup"] == {"overlapped": 1}


def test_the_figures_as_a_table() -> None:
    path = {"threads": 1, "tokens_per_s": 900.0, "staleness": 1.0, "steps": 6, "seconds_by_phase": {"update": 1.25}}
    path["data_plane"] = {"share": 0.0123}
    report = {
        "paths": {"synchronous": {**path, "seconds_per_step": 3.0}, "overlapped": {**path, "seconds_per_step": 2.0}},
        "speedup": {"synchronous": 1.5, "overlapped": 1.0},
    }
    console = Console(width=100, file=io.StringIO())
    console.print(render(report))
    text = console.file.getvalue()
    assert "overlapped is 1.50 times as fast as synchronous" in text
    assert "1.25" in text
    assert "1.2%" in text
