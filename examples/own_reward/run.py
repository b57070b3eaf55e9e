"""Train a tiny model with the reward in reward.py, report, and draw the curve. `--tiny` trains for two small steps."""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import commands

TINY = ("steps=2", "rollout.num_prompts=4", "rollout.samples_per_prompt=4", "eval.num_prompts=4")


def main() -> None:
    """Run one command after another; what they write is in `.sluice/` in this folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="train for two small steps only")
    parser.add_argument("--curve", default=".sluice/curve.svg", help="the drawing; relative to this folder")
    arguments = parser.parse_args()

    commands.enter(__file__)
    run = commands.new_run_id("names")
    commands.make_model(".sluice/model")
    commands.train(run, *(TINY if arguments.tiny else ()))
    commands.report(run, arguments.curve, "reward of invented names")


if __name__ == "__main__":
    main()
