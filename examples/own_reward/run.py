"""Train a tiny model with the reward in reward.py, report, and draw the curve. `--tiny` trains for two small steps."""

import argparse
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
SERVICES = HERE.parents[1] / ".sluice"  # the local Prefect and Ray are those of the checkout
SLUICE = Path(sys.executable).with_name("sluice")
TINY = ("steps=2", "rollout.num_prompts=4", "rollout.samples_per_prompt=4", "eval.num_prompts=4")


def main() -> None:
    """Run one command after another; what they write is in `.sluice/` in this folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="train for two small steps only")
    parser.add_argument("--curve", default=".sluice/curve.svg", help="the drawing; relative to this folder")
    arguments = parser.parse_args()

    run = f"names-{datetime.now():%Y%m%d-%H%M%S}"
    settings = ["runtime.runs_dir=.sluice/runs", f"runtime.services_dir={SERVICES}", *(TINY if arguments.tiny else ())]
    call(sys.executable, "../make_model.py", ".sluice/model")
    call(SLUICE, "train", "config.toml", "--run-id", run, *settings)
    call(SLUICE, "report", run, "--runs-dir", ".sluice/runs")
    call(sys.executable, "../draw_curve.py", f".sluice/runs/{run}", arguments.curve, "reward of invented names")


def call(*command: str | Path) -> None:
    """Print a command and run it in this folder; exit with its code if it fails."""
    print(f"$ {shlex.join(map(str, command))}", flush=True)
    if code := subprocess.run(command, cwd=HERE).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
