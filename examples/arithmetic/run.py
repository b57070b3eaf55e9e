"""Prepare and run the demo, report, and draw the curve. `--tiny` makes a short warm start and trains for two steps."""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SERVICES = HERE.parents[1] / ".sluice"  # the local Prefect and Ray are those of the checkout
SLUICE = Path(sys.executable).with_name("sluice")
RUNS = ".sluice/runs"


def main() -> None:
    """Run one command after another; what they write is in `.sluice/` in this folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a short warm start and two steps only")
    parser.add_argument("--curve", default=".sluice/curve.svg", help="the drawing; relative to this folder")
    arguments = parser.parse_args()

    settings = [f"runtime.runs_dir={RUNS}", f"runtime.services_dir={SERVICES}"]
    call(SLUICE, "demo", *settings, *(["--tiny"] if arguments.tiny else []))
    run = max((HERE / RUNS).iterdir(), key=lambda folder: folder.stat().st_mtime).name
    call(SLUICE, "report", run, "--runs-dir", RUNS)
    call(sys.executable, "../draw_curve.py", f"{RUNS}/{run}", arguments.curve, "sums of four to six numbers")


def call(*command: str | Path) -> None:
    """Print a command and run it in this folder; exit with its code if it fails."""
    print(f"$ {shlex.join(map(str, command))}", flush=True)
    if code := subprocess.run(command, cwd=HERE).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
