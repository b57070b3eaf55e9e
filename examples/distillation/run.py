"""Make teacher and student, distill, train the same student by GRPO alone, report, and draw the curve.

`--tiny` makes both models in a few steps, and distills for two small ones.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import commands


def main() -> None:
    """Run one command after another; what they write is in `.sluice/` in this folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="models of a few steps, and two small steps only")
    parser.add_argument("--seed", type=int, default=0, help="of the models and the runs")
    parser.add_argument("--curve", default=".sluice/curve.svg", help="the drawing; relative to this folder")
    arguments = parser.parse_args()

    commands.enter(__file__)
    folder = f".sluice/{'tiny-' if arguments.tiny else ''}seed-{arguments.seed}"
    commands.call(sys.executable, "make_files.py", folder, str(arguments.seed), *(["5", "5"] if arguments.tiny else []))
    settings = (
        f"seed={arguments.seed}",
        f"model.path={folder}/student",
        f"data.train_path={folder}/train.jsonl",
        f"data.eval_path={folder}/heldout.jsonl",
    )
    run = commands.new_run_id("distill")
    teacher = f"distillation.teachers.large.path={folder}/teacher"
    commands.train(run, *settings, teacher, *(commands.TINY if arguments.tiny else ()))
    if not arguments.tiny:
        commands.train(commands.new_run_id("grpo"), *settings, "distillation=None")
    commands.report(run, arguments.curve, "sums of four numbers, learned from a teacher")


if __name__ == "__main__":
    main()
