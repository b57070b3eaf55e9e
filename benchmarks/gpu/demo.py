"""Whole runs of `sluice demo`: on CUDA with vLLM; policy and engine share a GPU, or have one each and NCCL."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from benchmarks.gpu.results import CheckResult, Figure, Settings
from infra.storage.runs import RunDirectory
from schemas.errors import RunError

Placement = Literal["colocated", "separate"]
TRANSPORTS = {"colocated": "shared_memory", "separate": "broadcast"}
MAX_MISMATCH = 0.1  # nats, mean over the tokens, between sampler and trainer; bfloat16 in both on a GPU
STEPS = 10
GPU_ARGUMENTS = (
    *("--config", "demo_vllm", "--steps", str(STEPS)),
    *("rollout.dtype=bfloat16", "model.compute_dtype=bfloat16"),
)
TWIN_ARGUMENTS = ("--config", "demo", "--tiny", "runtime.num_threads=1")


def check(settings: Settings, folder: Path, *, placement: Placement) -> CheckResult:
    """Run the demo in the checklist's folder, whose services and fine-tuned model its two placements share.

    Raises:
        RunError: The command failed.
    """
    name = f"demo {placement}"
    if placement == "separate" and not settings.is_twin and (num_gpus := _count_gpus()) < 2:
        return CheckResult(
            name=name, status="skipped", reason=f"policy and engine need a GPU each, and this machine has {num_gpus}"
        )
    runs = folder / f"runs-{placement}"
    _run_demo(
        folder,
        *(TWIN_ARGUMENTS if settings.is_twin else GPU_ARGUMENTS),
        *(f"runtime.device={settings.device}", f"runtime.placement={placement}", f"runtime.runs_dir={runs}"),
        *(f"weights.transport={TRANSPORTS[placement]}", "correction.kind=truncated", "kl.coef=0"),
    )
    return _result(name, runs, TRANSPORTS[placement])


def _count_gpus() -> int:
    import torch  # takes seconds, and the twin has no use for it

    return torch.cuda.device_count()


def _run_demo(folder: Path, *arguments: str) -> None:
    # The run starts its own services, so it must not inherit the caller's configuration of them.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "RAY_"))}
    command = [sys.executable, "-P", "-m", "flows.cli.main", "demo", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise RunError(f"sluice demo ended with exit code {done.returncode}: {lines[-1]}")


def _result(name: str, runs: Path, transport: str) -> CheckResult:
    found = [path for path in runs.iterdir() if (path / "config.json").exists()]
    (path,) = [path for path in found if not path.name.startswith("demo-sft-")]  # which made the model
    steps = RunDirectory.open(path.name, runs).metrics.steps()
    published = [step.publish for step in steps if step.publish is not None]
    mismatch = fmean(step.metrics["mismatch/mean"] for step in steps)
    used = sorted({transfer.transport for transfer in published})
    figures: dict[str, Figure] = {
        "steps": len(steps),
        "seconds per step": round(median(step.seconds for step in steps), 3),
        "mismatch/mean": round(mismatch, 6),
        "mismatch/max": round(max(step.metrics["mismatch/max"] for step in steps), 4),
        "first reward": round(steps[0].metrics["reward"], 3),
        "last reward": round(steps[-1].metrics["reward"], 3),
        "weight transport": ", ".join(used),
        "publish seconds": round(median(each.write_seconds for each in published), 4) if published else 0.0,
    }
    missed = [] if used == [transport] else [f"weights went by {used}, not by {transport}"]
    if not mismatch <= MAX_MISMATCH:
        missed.append(f"sampler and trainer differ by {mismatch:.3g} nats per token, allowed are {MAX_MISMATCH}")
    return CheckResult.of(name, figures, missed)
