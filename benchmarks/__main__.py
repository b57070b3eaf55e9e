"""The command `sluice bench NAME`; a benchmark is imported only when it is chosen."""

import argparse
import sys
from importlib import import_module

from benchmarks.command import run

COMMANDS = {  # a module with a `BENCHMARK`, and what is measured
    "chaos": ("benchmarks.chaos.run", "faults at random moments of real runs, against an undisturbed one"),
    "data-plane": ("benchmarks.data_plane.run", "one batch between two processes, against TransferQueue"),
    "families": ("benchmarks.families", "the table of docs/models.md: what works for each family of models"),
    "gpu": ("benchmarks.gpu.run", "the checklist of a GPU machine, with a twin for a CPU"),
    "sft": ("benchmarks.sft", "steps of supervised fine-tuning, and in TRL"),
    "step": ("benchmarks.step.run", "whole GRPO steps of real runs, in turn, overlapped, and in TRL"),
    "train": ("benchmarks.train", "updates of groups, with each prompt once and with each sample"),
    "versions": ("benchmarks.versions", "the tests with the oldest and the newest packages"),
}


def main() -> None:
    """Run a benchmark, or list the benchmarks."""
    shown = "\n".join(f"  {name:<12} {title}" for name, (_, title) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="sluice bench",
        usage="sluice bench NAME [OPTIONS]; sluice bench NAME --help shows the options of one",
        epilog=shown,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=COMMANDS, metavar="NAME", help="the benchmark:")
    name = parser.parse_args(sys.argv[1:2]).name
    module, title = COMMANDS[name]
    run(import_module(module).BENCHMARK, f"sluice bench {name}", title, sys.argv[2:])


if __name__ == "__main__":
    main()
