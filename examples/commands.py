"""The commands that the examples' scripts share; each is printed, and run in the example's folder."""

import argparse
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
    f"services.dir={EXAMPLES.parent / '.sluice'}",
)
TINY = ("steps=2", "rollout.num_prompts=4", "rollout.samples_per_prompt=4", "eval.num_prompts=4")  # of an agent
TINY_SFT = ("steps=2", "sft.num_rows=32", "optim.updates_per_step=2", "optim.warmup_updates=1")


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


def fine_tune(model: str, rows: str, out: str, *settings: str) -> None:
    """Fine-tune a model on rows as `sft.toml` and these settings say, and write it to `out`, unless that exists."""
    if Path(out).exists():
        return
    run = new_run_id("sft")
    files = (f"model.path={model}", f"data.train_path={rows}")
    call(SLUICE, "train", EXAMPLES / "sft.toml", "--run-id", run, *SETTINGS, *files, *settings)
    call(SLUICE, "export", run, out, "--runs-dir", RUNS)


def train(run: str, *settings: str) -> None:
    """Train as `config.toml` and these settings say."""
    call(SLUICE, "train", "config.toml", "--run-id", run, *SETTINGS, *settings)


def report(run: str, curve: str, title: str) -> None:
    """Report a run's metrics, and draw its rewards to the file `curve`."""
    call(SLUICE, "report", run, "--runs-dir", RUNS)
    call(sys.executable, "../draw_curve.py", f"{RUNS}/{run}", curve, title)


def run_agent(
    script: str, description: str | None, name: str, title: str, *sft: str, files: str = "make_files.py"
) -> None:
    """Make an agent example's files and model, train, report, and draw the curve, as the command line says.

    Args:
        script: The example's `run.py`.
        description: What its `--help` says.
        name: What its run ids begin with.
        title: The curve's.
        sft: What supervised fine-tuning has of other settings than `sft.toml`.
        files: The program that makes its files.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tiny", action="store_true", help="two small steps, of an untrained model")
    parser.add_argument("--seed", type=int, default=0, help="of the model and its two runs")
    parser.add_argument("--curve", default=".sluice/curve.svg", help="the drawing; relative to this folder")
    arguments = parser.parse_args()

    enter(script)
    folder = f".sluice/{'tiny-' if arguments.tiny else ''}seed-{arguments.seed}"
    seed = f"seed={arguments.seed}"
    call(sys.executable, files, folder, str(arguments.seed))
    tiny_sft = TINY_SFT if arguments.tiny else ()
    fine_tune(f"{folder}/random", f"{folder}/turns.jsonl", f"{folder}/model", seed, *sft, *tiny_sft)
    run = new_run_id(name)
    made = (
        f"model.path={folder}/model",
        f"data.train_path={folder}/train.jsonl",
        f"data.eval_path={folder}/heldout.jsonl",
    )
    train(run, seed, *made, *(TINY if arguments.tiny else ()))
    report(run, arguments.curve, title)


def enter(script: str) -> None:
    """Make the folder of a script the working directory."""
    os.chdir(Path(script).resolve().parent)
