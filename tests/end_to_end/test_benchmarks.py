"""The benchmarks of `sluice bench`: one tiny run per command, and what it measures; no time is asserted."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from benchmarks.families import COLUMNS
from benchmarks.gpu.check import all_checks
from benchmarks.gpu.results import Settings
from benchmarks.gpu.run import markdown
from benchmarks.step.run import measure_in, render
from benchmarks.step.workload import QUICK
from benchmarks.step.workspace import Workspace
from tests.support.ended import note_ended
from tests.support.progress import wait_until
from tests.support.workplace import Workplace

CHECKOUT = Path(__file__).parents[2]
BENCH = [sys.executable, "-m", "flows.cli.main", "bench"]
NEEDS_BENCH = pytest.mark.skipif(importlib.util.find_spec("transfer_queue") is None, reason="needs the extra `bench`")
DATA_PATHS = {"sluice", "transfer_queue", "memcpy"}
DATA_TIMES = {"put_ms", "read_ms", "permuted_read_ms", "append_ms", "round_trip_ms"}


def bench(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a benchmark without Ray's variables of this process, and with these ones; it must succeed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    finished = subprocess.run(
        [*BENCH, *arguments, "--json"],
        cwd=CHECKOUT,
        env=inherited | {"PYTHONPATH": str(CHECKOUT)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    note_ended(("bench", *arguments))
    return finished


def report_of(finished: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """Return the report that a benchmark prints on its last line."""
    report: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return report


def imported_by(finished: "subprocess.CompletedProcess[str]") -> set[str]:
    """Return the modules that a benchmark with PYTHONPROFILEIMPORTTIME imported."""
    return {line.rsplit("|", 1)[-1].strip() for line in finished.stderr.splitlines() if "|" in line}


@pytest.mark.extended
@NEEDS_BENCH
def test_data_plane_measures_and_verifies_every_path() -> None:
    report = report_of(bench("data-plane", "--quick"))
    assert report["batch"]["rows"] == 512
    assert set(report["paths"]) == DATA_PATHS
    for name, figures in report["paths"].items():
        assert figures["bytes"] > 0
        assert figures.keys() >= ({"put_ms", "append_ms"} if name == "memcpy" else DATA_TIMES)
        assert all(value > 0 for value in figures.values())
    assert set(report["ratios"]) == DATA_PATHS - {"memcpy"}
    assert report["large"]["memcpy_ms"] > 0
    # Bytes don't depend on the machine.
    assert 1 < report["stored_ratio"] < 1.05
    assert report["paths"]["memcpy"]["bytes"] == report["batch"]["valid_bytes"]


@pytest.mark.extended
@NEEDS_BENCH
def test_terminating_the_command_ends_all_that_it_started() -> None:
    command = [*BENCH, "data-plane", "--quick"]
    process = psutil.Popen(command, cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(
        lambda: process.poll() is not None or any(is_raylet(child) for child in process.children(recursive=True))
    )
    assert process.poll() is None
    started = process.children(recursive=True)
    process.terminate()
    assert process.wait() != 0
    psutil.wait_procs(started)


def is_raylet(process: psutil.Process) -> bool:
    try:
        return process.name() == "raylet"
    except psutil.NoSuchProcess:
        return False


@pytest.mark.extended
@NEEDS_BENCH
def test_sft_has_the_losses_of_trl() -> None:
    pytest.importorskip("trl")
    report = report_of(bench("sft", "--quick", "--peer", "trl"))
    assert report["loss_difference"] < 1e-5
    assert list(report["trainers"]) == ["sluice", *(f"trl, padded, {n} rows a forward" for n in (4, 1)), "trl, packed"]


@pytest.mark.command("bench")
def test_families_of_one_model_type() -> None:
    report = report_of(bench("families", "--quick"))
    assert report == {"llama": dict.fromkeys(COLUMNS)}


@pytest.mark.extended
def test_gpu_s_twin_runs_every_check(tmp_path: Path) -> None:
    done = bench("gpu", "--twin", "--out", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report_of(done) == report
    checks = {check["name"]: check for check in report["checks"]}
    assert list(checks) == list(all_checks(Settings(device="cpu", peak_tflops=1.0)))
    assert {check["status"] for check in checks.values()} == {"passed"}
    assert checks["speed tiny"]["figures"]["training MFU"] > 0
    assert checks["memory"]["figures"]["update planned MB"] > 0
    assert checks["demo colocated"]["figures"]["weight transport"] == "shared_memory"
    assert checks["demo separate"]["figures"]["weight transport"] == "broadcast"
    assert (tmp_path / "gpu.md").read_text() == markdown(report)


@pytest.mark.extended
def test_step_measures_real_runs(workplace: Workplace) -> None:
    # Six rows a step: TRL runs with 3 and 6 of them per forward. The services are those that are there.
    plan = replace(QUICK, samples=3, paths=("overlapped",), peer="trl")
    report = measure_in(Workspace(workplace.folder), plan)
    path = report["paths"]["overlapped"]
    assert path["staleness"] == 1
    assert path["steps"] == QUICK.steps - 2
    assert path["seconds_per_step"] > 0
    assert path["overhead_seconds"] > 0
    assert 0 < path["store_share"] < 1
    assert path["put_ms"] > 0
    assert path["tokens_per_s"] > 0
    assert {"rollout", "publish", "update"} <= set(path["seconds_by_phase"])
    assert report["speedup"]["overlapped"] == 1
    trl = report["peers"]["trl"]
    assert set(trl["seconds_by_rows_per_forward"]) == {3, 6}
    assert trl["rows_per_forward"] in trl["seconds_by_rows_per_forward"]
    assert trl["seconds_per_step"] > trl["generate_seconds"] > 0
    assert 0 < trl["response_tokens"] <= QUICK.tokens
    assert report["speedup_over_peers"]["trl"]["overlapped"] > 0
    console = Console(width=120, file=io.StringIO())
    console.print(render(report))
    shown = f"overlapped is {report['speedup_over_peers']['trl']['overlapped']:.2f} times as fast as trl"
    assert shown in console.file.getvalue()  # type: ignore[attr-defined]
