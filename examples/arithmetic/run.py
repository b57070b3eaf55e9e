"""Prepare and run the demo, report, and draw the curve. `--tiny`: a few steps, which learn nothing."""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import commands


def main() -> None:
    """Run one command after another; what they write is in `.sluice/` in this folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="two steps of fine-tuning, and two of GRPO")
    parser.add_argument("--curve", default=".sluice/curve.svg", help="the drawing; relative to this folder")
    arguments = parser.parse_args()

    commands.enter(__file__)
    commands.call(commands.SLUICE, "demo", *commands.SETTINGS, *(["--tiny"] if arguments.tiny else []))
    run = max(Path(commands.RUNS).iterdir(), key=lambda folder: folder.stat().st_mtime).name
    commands.report(run, arguments.curve, "sums of four to six numbers")


if __name__ == "__main__":
    main()
