"""Make teacher and student, distill, train the same student by GRPO alone, evaluate the teacher, report, and draw.

`--tiny` distills for two small steps, from and to an untrained model.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import commands

SFT = {  # the settings of each that differ from sft.toml's
    "teacher": ("steps=300", "sft.num_rows=32", "optim.updates_per_step=1"),
    "student": ("steps=400", "sft.num_rows=64", "optim.updates_per_step=1"),
}


def main() -> None:
    """Run one command after another; what they write is in `.sluice/` in this folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="two small steps, of untrained models")
    parser.add_argument("--seed", type=int, default=0, help="of the models and the runs")
    parser.add_argument("--curve", default=".sluice/curve.svg", help="the drawing; relative to this folder")
    arguments = parser.parse_args()

    commands.enter(__file__)
    folder = f".sluice/{'tiny-' if arguments.tiny else ''}seed-{arguments.seed}"
    seed, tiny_sft = f"seed={arguments.seed}", commands.TINY_SFT if arguments.tiny else ()
    commands.call(sys.executable, "make_files.py", folder, str(arguments.seed))
    for name, sft in SFT.items():
        files = (f"{folder}/random-{name}", f"{folder}/{name}.jsonl", f"{folder}/{name}")
        commands.fine_tune(*files, seed, *sft, *tiny_sft)
    files = (seed, f"data.train_path={folder}/train.jsonl", f"data.eval_path={folder}/heldout.jsonl")
    settings = (*files, f"model.path={folder}/student")
    run = commands.new_run_id("distill")
    teacher = f"distillation.teachers.large.path={folder}/teacher"
    commands.train(run, *settings, teacher, *(commands.TINY if arguments.tiny else ()))
    if not arguments.tiny:
        commands.train(commands.new_run_id("grpo"), *settings, "distillation=None")
        commands.train(  # what the teacher can do is its accuracy after 0 steps
            commands.new_run_id("teacher"), *files, f"model.path={folder}/teacher", "distillation=None", "steps=1"
        )
    commands.report(run, arguments.curve, "sums of four numbers, learned from a teacher")


if __name__ == "__main__":
    main()
