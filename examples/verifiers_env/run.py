"""Make a tiny model, train it to play a game of verifiers, report, and draw the curve. `--tiny`: two small steps."""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import commands

from infra import integrations

ROWS = Path(integrations.__path__[0]) / "verifiers_rows.py"
VENV = ".sluice/venv"
VERIFIERS = "verifiers==0.4.0"


def main() -> None:
    """Run one command after another; what they write is in `.sluice/` in this folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="two small steps, of an untrained model")
    parser.add_argument("--seed", type=int, default=0, help="of the model and its two runs")
    parser.add_argument("--python", help="an interpreter that has verifiers; without it, one is made")
    parser.add_argument("--curve", default=".sluice/curve.svg", help="the drawing; relative to this folder")
    arguments = parser.parse_args()

    commands.enter(__file__)
    python = arguments.python or make_interpreter()
    folder = f".sluice/{'tiny-' if arguments.tiny else ''}seed-{arguments.seed}"
    seed, tiny_sft = f"seed={arguments.seed}", commands.TINY_SFT if arguments.tiny else ()
    commands.call(sys.executable, "../guess_the_number/make_files.py", folder, str(arguments.seed))
    commands.fine_tune(f"{folder}/random", f"{folder}/turns.jsonl", f"{folder}/model", seed, *tiny_sft)
    commands.call(python, ROWS, "config.toml", f"{folder}/tasks.jsonl", "--take", "1000")
    commands.call(python, ROWS, "config.toml", f"{folder}/heldout-tasks.jsonl", "--take", "70")
    run = commands.new_run_id("verifiers")
    files = (
        f"model.path={folder}/model",
        f"data.train_path={folder}/tasks.jsonl",
        f"data.eval_path={folder}/heldout-tasks.jsonl",
        f"environment.python={python}",
    )
    commands.train(run, seed, *files, *(commands.TINY if arguments.tiny else ()))
    commands.report(run, arguments.curve, "numbers guessed in three turns")


def make_interpreter() -> str:
    """Install verifiers into a virtual environment of its own, unless it is there; return its interpreter."""
    python, installed = Path(VENV, "bin", "python"), Path(VENV, "installed")
    if not installed.exists():
        commands.call(sys.executable, "-m", "venv", VENV)
        commands.call(python, "-m", "pip", "install", "--quiet", VERIFIERS)
        installed.touch()
    return str(python)


if __name__ == "__main__":
    main()
