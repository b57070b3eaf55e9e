"""The GPU checklist: its twin on the CPU passes, and a check that fails doesn't end the others."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.gpu import demo, kernels
from benchmarks.gpu.check import MODELS, Check, all_checks
from benchmarks.gpu.report import markdown, render
from benchmarks.gpu.results import CheckResult, Report, Settings
from benchmarks.gpu.run import CHECKOUT, run_checks

TWIN, REAL = Settings(device="cpu", peak_tflops=1.0), Settings(device="cuda", peak_tflops=989.0)


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "benchmarks.gpu", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_twin_runs_every_check(tmp_path: Path) -> None:
    done = bench("--twin", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = Report.model_validate_json((tmp_path / "gpu.json").read_bytes())
    assert json.loads(done.stdout.splitlines()[-1]) == report.model_dump(mode="json")
    checks = {check.name: check for check in report.checks}
    assert list(checks) == list(all_checks(TWIN))
    assert {check.status for check in checks.values()} == {"passed"}
    assert checks["speed tiny"].figures["training MFU"] > 0  # type: ignore[operator]
    assert checks["memory"].figures["update planned MB"] > 0  # type: ignore[operator]
    assert checks["demo colocated"].figures["weight transport"] == "shared_memory"
    assert checks["demo separate"].figures["weight transport"] == "broadcast"
    assert (tmp_path / "gpu.md").read_text() == markdown(report)


@pytest.mark.slow
def test_without_a_gpu_it_refuses_in_one_line() -> None:
    for arguments, message in ((), "torch finds no CUDA device"), (("--twin", "--checks", "sped"), "'sped' is not one"):
        done = bench(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert message in done.stderr


@pytest.mark.slow
def test_a_check_that_fails_or_takes_too_long_does_not_end_the_others(tmp_path: Path) -> None:
    checks = {"speed huge": Check("benchmarks.gpu.speed", 900), "kernels": Check("benchmarks.gpu.kernels", 0.01)}
    report = run_checks(TWIN, checks, tmp_path)
    assert not report.is_passed
    assert [(check.status, check.reason) for check in report.checks] == [
        ("failed", "KeyError: 'speed huge'"),
        ("failed", "it took more than 0.01 s"),
    ]


def test_the_budget_is_25_minutes_less_the_installation() -> None:
    checks = all_checks(REAL)
    assert [name for name in checks if name.startswith("speed")] == [f"speed {name}" for name in MODELS]
    assert sum(check.limit_seconds for check in checks.values()) <= 21 * 60


def test_two_workers_of_their_own_need_two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = demo.check(REAL, tmp_path, placement="separate")
    assert (result.status, result.reason) == (
        "skipped",
        "policy and engine need a GPU each, and this machine has 1",
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_kernels_agree_with_their_cpu_counterparts(device: str, tmp_path: Path) -> None:
    result = kernels.check(TWIN.replace(device=device), tmp_path)
    assert (result.status, result.reason, len(result.figures)) == ("passed", "", 5)


def test_the_report_as_a_table_and_as_markdown() -> None:
    passed = CheckResult.of("speed qwen3-4b", {"training MFU": 0.41}, [])
    failed = CheckResult.of(
        "memory", {"update measured / planned": 1.3}, ["update takes 1.30 times | the planned memory"]
    )
    machine = {"gpus": ["NVIDIA H100"], "versions": {"torch": "2.13.0"}}
    report = Report(settings=REAL, machine=machine, checks=(passed, failed), seconds=900)
    console = Console(width=140, file=io.StringIO())
    console.print(render(report))
    for text in (console.file.getvalue(), page := markdown(report)):  # type: ignore[attr-defined]
        assert "GPU checklist on 1 x NVIDIA H100" in text
        assert "2 checks in 900 s, 1 failed; MFU is of 989 TFLOP/s; torch 2.13.0" in text
        assert "training MFU: 0.41" in text
    assert (
        "| memory | failed | 0 | update takes 1.30 times \\| the planned memory<br>update measured / planned: 1.3 |"
        in page
    )
    assert "its figures say nothing of a GPU" in markdown(report.replace(settings=TWIN))
