"""Run the pipeline: fine-tune, sweep GRPO, and promote the best model if it passes the gate; report, draw the curve.

`--tiny` takes two small steps in each run, which learn nothing, so that the gate asks for nothing.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import commands

MODELS = ".sluice/models"
OPEN_GATE = ("gate.min_accuracy=0", "gate.min_gain=-1")


def main() -> None:
    """Run one command after another; what they write is in `.sluice/` in this folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="two small steps in each run, and a gate that asks nothing")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the runs")
    parser.add_argument("--id", help="the pipeline's id; one that was stopped goes on; default: a new one")
    parser.add_argument("--curve", default=".sluice/curve.svg", help="the drawing; relative to this folder")
    arguments = parser.parse_args()

    commands.enter(__file__)
    folder = f".sluice/{'tiny-' if arguments.tiny else ''}seed-{arguments.seed}"
    commands.call(sys.executable, "../distillation/make_files.py", folder, str(arguments.seed))
    tiny = (*of_stage("sft", commands.TINY_SFT), *of_stage("grpo", commands.TINY), *OPEN_GATE)
    pipeline = arguments.id or commands.new_run_id("sums")
    commands.call(
        *(commands.SLUICE, "pipeline", "pipeline.toml", "--id", pipeline),
        *(f"set.{setting}" for setting in (*commands.SETTINGS, f"seed={arguments.seed}")),
        *of_stage("sft", (f"model.path={folder}/random-student", f"data.train_path={folder}/student.jsonl")),
        *of_stage("grpo", (f"data.train_path={folder}/train.jsonl", f"data.eval_path={folder}/heldout.jsonl")),
        *(tiny if arguments.tiny else ()),
    )
    best = json.loads(Path(MODELS, pipeline, "result.json").read_text())["best"]["grpo"]
    commands.report(best, arguments.curve, "sums of four numbers, the best of two learning rates")


def of_stage(name: str, settings: tuple[str, ...]) -> list[str]:
    """Return changes to the config of one stage."""
    return [f"stages.{name}.set.{setting}" for setting in settings]


if __name__ == "__main__":
    main()
