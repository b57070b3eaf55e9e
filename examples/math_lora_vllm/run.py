"""Train on GSM8K with LoRA and vLLM. `--small` trains a small model on a CPU; `--tiny` does so for two steps."""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import commands

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
    parser.add_argument("--small", action="store_true", help="a small model and additions, on a CPU")
    parser.add_argument("--tiny", action="store_true", help="the small run of an untrained model, for two steps")
    parser.add_argument("--curve", default=".sluice/curve.svg", help="the drawing; relative to this folder")
    parser.add_argument("--python", help="an interpreter that has vLLM; default: the config's")
    arguments = parser.parse_args()

    commands.enter(__file__)
    run, settings, title = commands.new_run_id("gsm8k"), (), "GSM8K"
    if arguments.small or arguments.tiny:
        model = f".sluice/small/model{'-tiny' if arguments.tiny else ''}"
        commands.make_model(".sluice/random")
        commands.call(sys.executable, "small.py")
        sft = commands.TINY_SFT if arguments.tiny else ()
        commands.fine_tune(".sluice/random", ".sluice/small/solutions.jsonl", model, *sft)
        settings = (*SMALL, f"model.path={model}", *(TINY if arguments.tiny else ()))
        title = "additions worded as in GSM8K, 0.5 M parameters, LoRA, vLLM on a CPU"
    commands.train(run, *settings, *([f"rollout.python={arguments.python}"] if arguments.python else []))
    commands.report(run, arguments.curve, title)


if __name__ == "__main__":
    main()
