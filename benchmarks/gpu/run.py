"""The checklist: each check in a process of its own, ended if it takes too long; the others go on."""

import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Group

from benchmarks.command import Benchmark, Report, choose, option, table
from benchmarks.gpu.check import Check, all_checks, result_path
from benchmarks.gpu.results import CheckResult, Settings
from infra.engines.open import engine_versions
from infra.engines.vllm.installation import find_vllm
from infra.services.local import LocalServices
from schemas.config.rollout import VllmRollout
from schemas.errors import ConfigError

logger = logging.getLogger(__name__)

GPU_TFLOPS, TWIN_TFLOPS = 989.0, 1.0
GRACE_SECONDS = 15  # for a check's processes to end by themselves
SHOWN_LINES = 20  # of the output of a check that failed
CHECKOUT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "ray", "sluice-rl")


@dataclass(frozen=True)
class Plan:
    """The settings of the checklist."""

    twin: bool = option(False, "run the same checks on the CPU, with tiny sizes, as --quick does")
    peak_tflops: float = option(0.0, "dense bfloat16 peak, for the MFU; default: 989, an H100's or H200's")
    checks: tuple[str, ...] = option((), "comma-separated names of checks; default: all")
    rollout_python: str = option("", "the interpreter with vLLM for CUDA, which the demos need")
    out: str = option(".", "the folder for gpu.json and gpu.md")


def measure(plan: Plan) -> Report:
    """Run the chosen checks, and write gpu.json and gpu.md.

    Raises:
        ConfigError: There is no such check, no GPU, or no vLLM for the demos.
    """
    if not plan.twin and not torch.cuda.is_available():
        raise ConfigError(
            "torch finds no CUDA device on this machine; run the checklist on one that has a GPU, or run its twin on "
            "the CPU with --twin"
        )
    settings = Settings(
        device="cpu" if plan.twin else "cuda",
        peak_tflops=plan.peak_tflops or (TWIN_TFLOPS if plan.twin else GPU_TFLOPS),
        rollout_python=os.path.abspath(plan.rollout_python) if plan.rollout_python else None,
    )
    found, out = all_checks(settings), Path(plan.out)
    choose("checks", plan.checks, found)
    chosen = {name: found[name] for name in plan.checks or found}
    if not plan.twin and any(check.needs_vllm for check in chosen.values()):
        find_vllm(settings.rollout_python)  # fail now, not after the other checks
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        report = run_checks(settings, chosen, Path(folder))
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(report, indent=2) + "\n")
    (out / "gpu.md").write_text(markdown(report))
    return report


def is_passed(report: Report) -> bool:
    """Return whether no check failed."""
    return all(check["status"] != "failed" for check in report["checks"])


def render(report: Report) -> Group:
    """Return the report as a table and text."""
    return table(_title(report), _rows(report, "\n"), [_machine(report)])


def markdown(report: Report) -> str:
    """Return the report as a page of Markdown."""
    lines = [f"# {_title(report)}", "", _machine(report), "", "| check | status | s | figures |", "|---|---|---|---|"]
    for name, row in _rows(report, "<br>").items():
        cells = [cell.replace("|", "\\|") for cell in (name, *row.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def run_checks(settings: Settings, checks: Mapping[str, Check], folder: Path) -> Report:
    """Run checks, whatever becomes of each, and return their results.

    Args:
        settings: What they run on.
        checks: The checks by name.
        folder: An empty folder.
    """
    started, services = time.monotonic(), LocalServices(folder / ".sluice")
    results = []
    try:
        for name, check in checks.items():
            logger.info("%s: at most %.0f s", name, check.limit_seconds)
            results.append(result := _run(name, settings, check.limit_seconds, folder))
            logger.info("%s: %s %s", name, result.status, result.reason)
            if result.status == "failed":
                services.stop()  # its workers may still hold the device
    finally:
        services.stop()
    seconds = round(time.monotonic() - started, 1)
    return {
        "settings": settings.model_dump(),
        "machine": machine(settings),
        "checks": [result.model_dump() for result in results],
        "seconds": seconds,
    }


def machine(settings: Settings) -> dict[str, Any]:
    """Return what is needed to read the figures."""
    gpus = [] if settings.is_twin else [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    versions = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {
        "gpus": gpus,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "cuda": torch.version.cuda,
        "versions": {name: versions[name] for name in PACKAGES}
        | engine_versions(VllmRollout(python=settings.rollout_python)),
    }


def _run(name: str, settings: Settings, limit_seconds: float, folder: Path) -> CheckResult:
    started, log = time.monotonic(), result_path(folder, name).with_suffix(".log")
    command = [sys.executable, "-P", "-m", "benchmarks.gpu.check", name, settings.model_dump_json(), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            reason = _failure(process.wait(limit_seconds), log)
        except subprocess.TimeoutExpired:
            reason = f"it took more than {limit_seconds:g} s"
        finally:
            _end(process)
    seconds = round(time.monotonic() - started, 1)
    if reason:
        logger.warning("the last lines of %s:\n%s", name, "\n".join(_lines(log)[-SHOWN_LINES:]))
        return CheckResult(name=name, status="failed", reason=reason, seconds=seconds)
    result = CheckResult.model_validate_json(result_path(folder, name).read_bytes())
    return result.replace(seconds=seconds)


def _failure(exit_code: int, log: Path) -> str:
    """Return why a process failed: its last line, which is an error's message; empty if it did not fail."""
    lines = [line.strip() for line in _lines(log) if line.strip()]
    if exit_code > 0 and lines:
        return lines[-1]
    return f"its process ended with exit code {exit_code}" if exit_code else ""


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a check's process and those that it started, as far as they still run."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)


def _title(report: Report) -> str:
    if report["settings"]["device"] == "cpu":
        return "GPU checklist, twin on the CPU: its figures say nothing of a GPU"
    gpus = report["machine"]["gpus"]
    return f"GPU checklist on {len(gpus)} x {gpus[0]}"


def _machine(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["machine"]["versions"].items())
    failed = sum(check["status"] == "failed" for check in report["checks"])
    return (
        f"{len(report['checks'])} checks in {report['seconds']:.0f} s, {failed} failed; MFU is of "
        f"{report['settings']['peak_tflops']:g} TFLOP/s; {versions}"
    )


def _rows(report: Report, newline: str) -> dict[str, dict[str, str]]:
    return {
        check["name"]: {
            "status": check["status"],
            "s": f"{check['seconds']:.0f}",
            "figures": newline.join(
                [*filter(None, [check["reason"]]), *(f"{name}: {value}" for name, value in check["figures"].items())]
            ),
        }
        for check in report["checks"]
    }


BENCHMARK = Benchmark(Plan(), Plan(twin=True), measure, render, is_passed)
