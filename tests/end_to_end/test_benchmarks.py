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

from benchmarks.driver.run import Plan as DriverPlan
from benchmarks.driver.run import measure as measure_driver
from benchmarks.gpu.check import all_checks
from benchmarks.gpu.report import markdown
from benchmarks.gpu.results import Report, Settings
from benchmarks.orchestration import run as orchestration
from benchmarks.orchestration.report import render as render_orchestration
from benchmarks.step.run import measure as measure_step
from benchmarks.step.workload import QUICK
from benchmarks.step.workspace import LARGE_INFO_BYTES, Workspace
from tests.support.progress import wait_until
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

CHECKOUT = Path(__file__).parents[2]
BENCH = [sys.executable, "-m", "flows.cli.main", "bench"]
NEEDS_BENCH = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in ("transfer_queue", "matplotlib")),
    reason="needs the extra `bench`",
)
# Two benchmarks one after the other in one process, as both need torch and transformers; each prints a report.
TRAIN_AND_ROLLOUT = """
import runpy, sys
for name in ("train", "rollout"):
    sys.argv = [name, "--quick", "--json"]
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    except SystemExit as ended:
        assert not ended.code
"""
DATA_PATHS = {
    "sluice",
    "transfer_queue",
    "transfer_queue_padded",
    "ray_padded_dict",
    "ray_padded_numpy",
    "ray_padded_lean",
    "arrow_ipc_plasma",
    "memcpy",
}
DATA_TIMES = {"put_ms", "read_ms", "permuted_read_ms", "append_ms", "round_trip_ms"}
DRIVER_PARTS = ["open", "rollout", "ledger", "put", "score", "advantage", "update", "publish", "metrics", "clear"]
ROLLOUT_PATHS = ["sluice", "generate", "generate_static"]
TRAIN_PATHS = ["packed", "padded", "row_by_row", "dense", "dense_equal_count"]


def bench(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a benchmark without Ray's variables of this process, and with these ones; it must succeed."""
    return finish([*BENCH, *arguments, "--json"], **variables)


def finish(command: list[str], **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command as `bench` does; it must succeed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    finished = subprocess.run(
        command,
        cwd=CHECKOUT,
        env=inherited | {"PYTHONPATH": str(CHECKOUT)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    return finished


def report_of(finished: "subprocess.CompletedProcess[str]", before: int = 0) -> dict[str, Any]:
    """Return the report that a benchmark prints on its last line, or one of those before it."""
    report: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1 - before])
    return report


def imported_by(finished: "subprocess.CompletedProcess[str]") -> set[str]:
    """Return the modules that a benchmark with PYTHONPROFILEIMPORTTIME imported."""
    return {line.rsplit("|", 1)[-1].strip() for line in finished.stderr.splitlines() if "|" in line}


def test_agents_are_played_every_way_and_only_anew_prefills_more_than_the_new_tokens() -> None:
    small = ("--model", "tiny", "--rows", "8", "--turns", "3", "--milliseconds", "1", "--repeats", "1")
    ways = report_of(bench("agents", *small))
    assert list(ways) == ["engine", "anew", "wave", "steps", "journal", "arrival"]
    assert ways["engine"]["of engine"] == 1
    for way, figures in ways.items():
        assert figures["tokens/s"] > 0
        assert (figures["prefilled"] > figures["new tokens"]) == (way == "anew")


@NEEDS_BENCH
def test_data_plane_measures_and_verifies_every_path(tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"
    report = report_of(bench("data-plane", "--quick", "--plot", str(chart)))
    assert report["batch"]["rows"] == 512
    assert set(report["paths"]) == DATA_PATHS
    for name, figures in report["paths"].items():
        assert figures["verified"] is True
        assert figures["bytes"] > 0
        measured = {time for time in DATA_TIMES if figures[time] is not None}
        assert measured == ({"put_ms", "append_ms"} if name == "memcpy" else DATA_TIMES)
        assert all(figures[time] > 0 for time in measured)
    for ratio in ("ratio_vs_transfer_queue", "ratio_vs_best_padded", "memcpy_fraction_400mb", "read_400mb_ms"):
        assert report[ratio] > 0
    # Bytes don't depend on the machine.
    assert 1 < report["stored_ratio"] < 1.05
    assert report["paths"]["memcpy"]["bytes"] == report["batch"]["valid_bytes"]
    for operation in ("put", "read", "permuted_read"):
        parts = dict(report["breakdown"][operation])
        total = parts.pop("total")
        assert all(0 <= part <= total for part in parts.values())  # medians, which need not add up
    assert {"orchestration_put_ms", "orchestration_read_ms"} <= set(report["breakdown"])
    assert {"cores", "python", "ray", "torch", "pyarrow", "transferqueue"} <= set(report["machine"])
    assert "<svg" in chart.read_text()


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


def test_driver_runs_steps_against_fake_workers(ray_cluster: Any, tmp_path: Path) -> None:
    report = measure_driver(DriverPlan(ranks=5, rows=1300, steps=2), tmp_path)
    assert (report["ranks"], report["rows"], report["steps"]) == (5, 1296, 2)
    assert list(report["parts"]) == DRIVER_PARTS
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


def test_gpu_s_twin_runs_every_check(tmp_path: Path) -> None:
    done = bench("gpu", "--twin", "--out", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    report = Report.model_validate_json((tmp_path / "gpu.json").read_bytes())
    assert report_of(done) == report.model_dump(mode="json")
    checks = {check.name: check for check in report.checks}
    assert list(checks) == list(all_checks(Settings(device="cpu", peak_tflops=1.0)))
    assert {check.status for check in checks.values()} == {"passed"}
    assert checks["speed tiny"].figures["training MFU"] > 0  # type: ignore[operator]
    assert checks["memory"].figures["update planned MB"] > 0  # type: ignore[operator]
    assert checks["demo colocated"].figures["weight transport"] == "shared_memory"
    assert checks["demo separate"].figures["weight transport"] == "broadcast"
    assert (tmp_path / "gpu.md").read_text() == markdown(report)


def test_orchestration_measures_a_real_run(workplace: Workplace) -> None:
    report = orchestration.measure(orchestration.QUICK, Workspace(workplace.folder))  # with the services that are there
    assert report["steps"] == orchestration.QUICK.steps - 2
    assert report["step_overhead_ms_p50"] > 0
    assert {"put", "reference", "publish"} <= set(report["phases_ms_p50"])
    console = Console(width=100, file=io.StringIO())
    console.print(render_orchestration(report))
    text = console.file.getvalue()
    assert "overhead per step: p50" in text
    assert "between steps" in text


@pytest.fixture(scope="module")
def train_and_rollout() -> "subprocess.CompletedProcess[str]":
    return finish([sys.executable, "-P", "-c", TRAIN_AND_ROLLOUT], PYTHONPROFILEIMPORTTIME="1")


def test_train_and_rollout_need_no_ray_and_prefect(train_and_rollout: "subprocess.CompletedProcess[str]") -> None:
    imported = imported_by(train_and_rollout)
    assert {"torch", "transformers"} <= imported
    assert not imported & {"ray", "prefect", "vllm"}


def test_rollout_measures_every_path(train_and_rollout: "subprocess.CompletedProcess[str]") -> None:
    report = report_of(train_and_rollout)
    assert [(case["case"], case["path"]) for case in report["cases"]] == [
        (case, path) for case in ("equal", "varied") for path in ROLLOUT_PATHS
    ]
    for case in report["cases"]:
        assert (case["model"], case["rows"], case["repetitions"], case["max_response_tokens"] <= 16) == (
            "tiny", 4, 1, True,
        )  # fmt: skip
        assert (case["mean_response_tokens"] == 16) == (case["case"] == "equal")
        assert case["tokens_per_s"] > 0
        assert case["ratio_to_generate"] > 0
        assert case["max_difference"] < 1e-5
    assert list(report["paths"]) == ROLLOUT_PATHS
    assert report["paths_are_of"] == {"model": "tiny", "case": "varied"}
    assert all(path["tokens_per_s"] > 0 for path in report["paths"].values())
    assert report["paths"]["generate"]["ratio_to_generate"] == 1
    assert report["skipped"] == []


def test_step_measures_real_runs(workplace: Workplace) -> None:
    workspace = Workspace(workplace.folder)  # with the services that are there
    # Six rows a step: TRL runs with 3 and 6 of them per forward.
    plan = replace(QUICK, samples_per_prompt=3, paths=("overlapped", "large_chunks"), beside=1, peer="trl")
    report = measure_step(plan, workspace)
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
    assert set(trl["seconds_by_rows_per_forward"]) == {3, 6}
    assert trl["rows_per_forward"] in trl["seconds_by_rows_per_forward"]
    assert trl["seconds_per_step"] > trl["generate_seconds"] > 0
    assert 0 < trl["response_tokens"] <= QUICK.tokens
    assert report["speedup_over_peers"]["trl"]["overlapped"] > 0
    large = report["paths"]["large_chunks"]["data_plane"]
    assert large["rollout_put_bytes"] > 3 * LARGE_INFO_BYTES  # three samples of a prompt
    assert large["max_rollout_put_ms"] >= large["rollout_put_ms"] > 0


def test_train_measures_every_path(train_and_rollout: "subprocess.CompletedProcess[str]") -> None:
    report = report_of(train_and_rollout, before=1)
    assert [(case["pass"], case["path"]) for case in report["cases"]] == [
        (kind, path) for kind in ("logprob", "train") for path in TRAIN_PATHS
    ]
    for case in report["cases"]:
        assert (case["model"], case["fill"], case["tokens"], case["rows"]) == ("tiny", 0.25, 512, 16)
        assert case["positions"] == (16 * 128 if case["path"] == "padded" else pytest.approx(512, rel=0.1))
        for figure in ("tokens_per_s", "fraction_of_ideal", "fraction_of_equal_count"):
            assert case[figure] > 0
        assert case["peak_mb"] >= 0
    for summary in ("min_fraction_of_ideal", "min_fraction_of_equal_count", "min_speedup_x_fill"):
        assert report[summary] > 0
    (agreement,) = report["agreement"]
    assert agreement["targets"] > 0
    assert agreement["max_difference"] < 1e-5
    (vocabulary,) = report["vocabulary"]
    assert vocabulary["vocab_size"] == 151_936
    assert vocabulary["peak_mb"] > 0
