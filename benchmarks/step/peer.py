"""The same steps in another trainer, next to those of `sluice train`: same model, prompts, lengths and threads."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from statistics import fmean, median
from typing import Any

from benchmarks.step import trl_process
from benchmarks.step.trl_process import PeerSettings, PeerSteps
from benchmarks.step.workload import LEARNING_RATE, WARM_UP_STEPS, Plan, stop_token_ids
from benchmarks.step.workspace import DATA, KL_COEF, MODEL, REWARDS, Workspace
from infra.variables import TORCH_VARIABLES
from schemas.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_FORWARDS = 4  # a step's rows in 1, 2 or 4 forwards: the fastest counts


def require_trl() -> None:
    """Check that TRL is installed.

    Raises:
        ConfigError: It isn't.
    """
    if importlib.util.find_spec("trl") is None:
        raise ConfigError("--peer trl needs the extra `bench`; install it with: pip install -e '.[bench]'")


def call_trl(program: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run a Python program in a process of its own, and return the JSON object on the last line that it prints.

    Args:
        program: Python's arguments: a file, or `-c` and a text.
        settings: Its argument, as JSON.

    Raises:
        ConfigError: The process failed; its standard error has been printed.
    """
    command = [sys.executable, "-P", *program, json.dumps(settings)]
    # As its users run it: without the variables that Sluice sets for itself.
    own = {name: value for name, value in os.environ.items() if TORCH_VARIABLES.get(name) != value}
    done = subprocess.run(command, env=own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"TRL's process failed with exit code {done.returncode}; see its output above")
    found: dict[str, Any] = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    return found


def run_trl(plan: Plan, workspace: Workspace, threads: int, rows_per_forward: int, seed: int) -> PeerSteps:
    """Train the benchmark's model in TRL, in a process of its own.

    Raises:
        ConfigError: The process failed; its standard error has been printed.
    """
    with tempfile.TemporaryDirectory(dir=workspace.folder) as output:
        settings = PeerSettings(
            model=str(workspace.folder / MODEL),
            data=str(workspace.folder / DATA),
            output=output,
            reward=REWARDS,
            num_prompts=plan.prompts,
            samples_per_prompt=plan.samples,
            tokens=plan.tokens,
            stop_token_ids=stop_token_ids(plan),
            steps=plan.steps,
            threads=threads,
            rows_per_forward=rows_per_forward,
            kl_coef=KL_COEF,
            lr=LEARNING_RATE,
            seed=seed,
        )
        steps = PeerSteps(**call_trl([trl_process.__file__], asdict(settings)))
    logger.info("trl-%d, %d rows per forward: %.2f s per step", seed, rows_per_forward, median(steps.seconds))
    return steps


class TrlRuns:
    """Runs of TRL with several sizes of a forward, of which the fastest is reported.

    Args:
        plan: The settings of the measurement.
        threads: Threads of its process.
    """

    def __init__(self, plan: Plan, threads: int) -> None:
        require_trl()
        self._plan, self._threads = plan, threads
        num_rows, splits = plan.prompts * plan.samples, range(MAX_FORWARDS.bit_length())
        sizes = {num_rows >> split for split in splits if num_rows % (1 << split) == 0}
        self._runs: dict[int, list[PeerSteps]] = {size: [] for size in sorted(sizes)}

    def run(self, workspace: Workspace, seed: int) -> None:
        """Run each size once."""
        for size, runs in self._runs.items():
            runs.append(run_trl(self._plan, workspace, self._threads, size, seed))

    def summary(self) -> dict[str, Any]:
        """Return the figures of the fastest size.

        Returns:
            Medians over the steps after each run's warm-up: `seconds_per_step`, `generate_seconds`, `other_seconds`;
            the mean `response_tokens`; `rows_per_forward`; `seconds_by_rows_per_forward` of all sizes; the threads and
            the version.
        """
        seconds = {size: median(_late(runs, "seconds")) for size, runs in self._runs.items()}
        fastest = min(seconds, key=lambda size: seconds[size])
        generate = median(_late(self._runs[fastest], "generate_seconds"))
        return {
            "seconds_per_step": seconds[fastest],
            "generate_seconds": generate,
            "other_seconds": seconds[fastest] - generate,
            "response_tokens": fmean(_late(self._runs[fastest], "response_tokens")),
            "rows_per_forward": fastest,
            "seconds_by_rows_per_forward": seconds,
            "threads": self._threads,
            "version": version("trl"),
        }


def _late(runs: list[PeerSteps], name: str) -> list[float]:
    return [value for run in runs for value in getattr(run, name)[WARM_UP_STEPS:]]
