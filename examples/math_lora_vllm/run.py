"""Train on GSM8K with LoRA and vLLM. `--small` trains a small model on a CPU; `--tiny` does so for two steps."""

import argparse
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
SERVICES = HERE.parents[1] / ".sluice"  # the local Prefect and Ray are those of the checkout
SLUICE = Path(sys.executable).with_name("sluice")
SMALL = (  # what differs from config.toml for the small model, on any CPU
    "name=gsm8k-small",
    "steps=40",
    "data.train_path=.sluice/small/train.jsonl",
    "data.eval_path=.sluice/small/heldout.jsonl",
    "data.max_prompt_tokens=96",
    "model.compute_dtype=float32",
    "model.gradient_checkpointing=false",
    "model.lora.rank=16",
    "model.lora.alpha=32",
    "rollout.dtype=float32",
    "rollout.num_prompts=16",
    "rollout.max_response_tokens=24",
    "rollout.cache_bytes=67108864",
    "optim.lr=1e-3",
    "runtime.device=cpu",
)
TINY = ("steps=2", "rollout.num_prompts=4", "rollout.samples_per_prompt=4", "eval.every_steps=0", "eval.num_prompts=4")


def main() -> None:
    """Run one command after another; what they write is in `.sluice/` in this folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small warm-started model and additions, on a CPU")
    parser.add_argument("--tiny", action="store_true", help="the small run without a warm start, for two steps")
    parser.add_argument("--curve", default=".sluice/curve.svg", help="the drawing; relative to this folder")
    arguments = parser.parse_args()

    settings = ["runtime.runs_dir=.sluice/runs", f"runtime.services_dir={SERVICES}"]
    title = "GSM8K"
    if arguments.small or arguments.tiny:
        warm_start_steps = 1 if arguments.tiny else 150
        call(sys.executable, "../make_model.py", ".sluice/random")
        call(sys.executable, "small.py", str(warm_start_steps))
        settings += [*SMALL, f"model.path=.sluice/small/model-{warm_start_steps}", *(TINY if arguments.tiny else ())]
        title = "additions worded as in GSM8K, 0.5 M parameters, LoRA, vLLM on a CPU"
    run = f"gsm8k-{datetime.now():%Y%m%d-%H%M%S}"
    call(SLUICE, "train", "config.toml", "--run-id", run, *settings)
    call(SLUICE, "report", run, "--runs-dir", ".sluice/runs")
    call(sys.executable, "../draw_curve.py", f".sluice/runs/{run}", arguments.curve, title)


def call(*command: str | Path) -> None:
    """Print a command and run it in this folder; exit with its code if it fails."""
    print(f"$ {shlex.join(map(str, command))}", flush=True)
    if code := subprocess.run(command, cwd=HERE).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
