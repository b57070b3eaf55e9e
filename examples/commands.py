"""The commands that the examples' scripts share; each is printed, and run in the example's folder."""

import os
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
SLUICE = Path(sys.executable).with_name("sluice")
RUNS = ".sluice/runs"
SETTINGS = (  # runs are in the example's folder; the local Prefect and Ray are those of the checkout
    f"runtime.runs_dir={RUNS}",
    f"runtime.services_dir={EXAMPLES.parent / '.sluice'}",
)


def new_run_id(name: str) -> str:
    """Return a run id with the current time."""
    return f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def call(*command: str | Path) -> None:
    """Print a command and run it; exit with its code if it fails."""
    print(f"$ {shlex.join(map(str, command))}", flush=True)
    if code := subprocess.run(command).returncode:
        sys.exit(code)


def make_model(folder: str) -> None:
    """Make a tiny model with random weights, unless it exists."""
    call(sys.executable, "../make_model.py", folder)


def train(run: str, *settings: str) -> None:
    """Train as `config.toml` and these settings say."""
    call(SLUICE, "train", "config.toml", "--run-id", run, *SETTINGS, *settings)


def report(run: str, curve: str, title: str) -> None:
    """Report a run's metrics, and draw its rewards to the file `curve`."""
    call(SLUICE, "report", run, "--runs-dir", RUNS)
    call(sys.executable, "../draw_curve.py", f"{RUNS}/{run}", curve, title)


def enter(script: str) -> None:
    """Make the folder of a script the working directory."""
    os.chdir(Path(script).resolve().parent)
