"""The benchmark of whole steps runs them; no time is asserted."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.step.report import render
from benchmarks.step.run import measure
from benchmarks.step.workload import QUICK
from benchmarks.step.workspace import LARGE_INFO_BYTES, Workspace
from tests.support.workplace import Workplace


@pytest.mark.slow
def test_the_benchmark_measures_real_runs(workplace: Workplace) -> None:
    workspace = Workspace(workplace.folder)  # with the services that are there
    report = measure(replace(QUICK, paths=("overlapped", "large_chunks"), peer="trl"), workspace)
    path = report["paths"]["overlapped"]
    assert path["staleness"] == 1
    assert path["steps"] == QUICK.steps - 2
    assert path["seconds_per_step"] > 0
    assert 0 < path["data_plane"]["share"] <= path["data_plane"]["max_share"]
    assert path["data_plane"]["first_put_ms"] > 0
    assert path["tokens_per_s"] > 0
    assert {"rollout", "publish", "update"} <= set(path["seconds_by_phase"])
    assert report["speedup"]["overlapped"] == 1
    trl = report["peers"]["trl"]
    assert trl["rows_per_forward"] in trl["seconds_by_rows_per_forward"]
    assert trl["seconds_per_step"] > trl["generate_seconds"] > 0
    assert 0 < trl["response_tokens"] <= QUICK.tokens
    assert report["speedup_over_peers"]["trl"]["overlapped"] > 0
    large = report["paths"]["large_chunks"]["data_plane"]
    assert large["rollout_put_bytes"] > 2 * LARGE_INFO_BYTES  # two samples of a prompt
    assert large["max_rollout_put_ms"] >= large["rollout_put_ms"] > 0


def test_the_figures_as_a_table() -> None:
    path = {"threads": 1, "tokens_per_s": 900.0, "staleness": 1.0, "steps": 6, "seconds_by_phase": {"update": 1.25}}
    path["data_plane"] = {"share": 0.0123}
    peer = {"version": "1.16.0", "seconds_per_step": 9.0, "generate_seconds": 5.0, "other_seconds": 4.0}
    peer["rows_per_forward"] = 32
    report = {
        "paths": {"synchronous": {**path, "seconds_per_step": 3.0}, "overlapped": {**path, "seconds_per_step": 2.0}},
        "speedup": {"synchronous": 1.5, "overlapped": 1.0},
        "peers": {"trl": peer},
        "speedup_over_peers": {"trl": {"synchronous": 3.0}},
    }
    console = Console(width=100, file=io.StringIO())
    console.print(render(report))
    text = console.file.getvalue()
    assert "overlapped is 1.50 times as fast as synchronous" in text
    assert "synchronous is 3.00 times as fast as trl" in text
    assert "1.25" in text
    assert "1.2%" in text
