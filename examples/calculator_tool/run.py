"""Make a tiny model, train it to call tools, report, and draw the curve. `--tiny` trains for two small steps."""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import commands

TINY = ("steps=2", "rollout.num_prompts=4", "rollout.samples_per_prompt=4", "eval.num_prompts=4")


def main() -> None:
    """Run one command after another; what they write is in `.sluice/` in this folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a short warm start and two small steps only")
    parser.add_argument("--seed", type=int, default=0, help="of the model, its warm start and the run")
    parser.add_argument("--curve", default=".sluice/curve.svg", help="the drawing; relative to this folder")
    arguments = parser.parse_args()

    commands.enter(__file__)
    folder = f".sluice/{'tiny-' if arguments.tiny else ''}seed-{arguments.seed}"
    commands.call(sys.executable, "make_files.py", folder, str(arguments.seed), *(["5"] if arguments.tiny else []))
    run = commands.new_run_id("calculator")
    files = (
        f"model.path={folder}/model",
        f"data.train_path={folder}/train.jsonl",
        f"data.eval_path={folder}/heldout.jsonl",
    )
    commands.train(run, f"seed={arguments.seed}", *files, *(TINY if arguments.tiny else ()))
    commands.report(run, arguments.curve, "questions answered by calling a tool")


if __name__ == "__main__":
    main()
