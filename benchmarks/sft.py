"""Whole steps of supervised fine-tuning: `sluice train`, and TRL's trainer with padded and with packed rows.

All train the same model on the same texts in the same order. Padded steps have the rows of ours, and so the same
losses; packed ones have others, as TRL packs the data set beforehand, and its log says that rows attend to each other
without an attention kernel that tells them apart, which a CPU lacks.
"""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

import numpy as np
from rich.console import Group

from benchmarks.command import Benchmark, Report, option, require_steps, table, temporary_place
from benchmarks.models import size_of
from benchmarks.step.peer import call_trl, require_trl
from benchmarks.step.workspace import MODEL, Workspace
from infra.models.tiny import make_model
from infra.storage.runs import RunDirectory

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2
LEARNING_RATE = 1e-4
ROWS = "rows.jsonl"
SAME_LOSS = 1e-5  # largest difference of a step's loss from that of padded steps
PEER = """
import json, sys, time, torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

s = json.loads(sys.argv[1])
torch.set_num_threads(s["threads"])
seconds, tokens = [], []

class Trainer(SFTTrainer):
    def training_step(self, model, inputs, *rest):
        mask = inputs.get("attention_mask")
        tokens[-1] += int(inputs["input_ids"].numel() if mask is None else mask.sum())
        return super().training_step(model, inputs, *rest)

class Clock(__import__("transformers").TrainerCallback):
    def on_step_begin(self, *_, **__):
        self.started = time.perf_counter()
        tokens.append(0)
    def on_step_end(self, *_, **__):
        seconds.append(time.perf_counter() - self.started)

packed = {"packing": True, "max_length": s["pack_tokens"]} if s["packed"] else {"max_length": None}
options = SFTConfig(
    output_dir=s["output"], per_device_train_batch_size=s["batch"], gradient_accumulation_steps=s["accumulation"],
    max_steps=s["steps"], learning_rate=s["lr"], lr_scheduler_type="constant", logging_steps=1, save_strategy="no",
    report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, train_sampling_strategy="sequential",
    model_init_kwargs={"dtype": "float32"}, disable_tqdm=True, **packed,
)
rows = load_dataset("json", data_files=s["rows"], split="train")
trainer = Trainer(
    model=s["model"], args=options, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(s["model"]),
    callbacks=[Clock()],
)
trainer.train()
losses = [step["loss"] for step in trainer.state.log_history if "loss" in step]
print(json.dumps({"seconds": seconds, "tokens": tokens, "losses": losses}))
"""


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement."""

    model: str = option("small", "tiny, small or mid")
    rows: int = option(32, "rows per step, a multiple of 4")
    tokens: int = option(512, "tokens of the longest row; most are much shorter")
    steps: int = option(8, "steps per run, of which the first two are not counted")
    repetitions: int = option(2, "runs of each; they take turns")
    threads: int = option(0, "threads; 0: as many as cores")
    peer: str = option("", "run its trainer next to the runs", choices=("", "trl"), metavar="trl")


QUICK = Plan(model="tiny", rows=4, tokens=64, steps=3, repetitions=1)


def measure(plan: Plan) -> Report:
    """Measure in a folder with services of its own.

    Returns:
        Medians over all steps after each run's warm-up, by trainer: `seconds_per_step` and `tokens_per_s`;
        `loss_difference`, the largest of a step's loss from that of TRL's padded steps; `speedup`: ours in tokens per
        second, over that of the fastest of TRL's.

    Raises:
        ConfigError: There is no step after the warm-up; or the peer is not installed, or fails.
    """
    require_steps(plan.steps, WARM_UP_STEPS)
    if plan.peer:
        require_trl()
    found: dict[str, list[dict[str, list[float]]]] = {}
    with temporary_place(Workspace) as workspace:
        _write_inputs(workspace, plan)
        for repetition in range(plan.repetitions):
            for name, steps in _runs(workspace, plan, repetition):
                found.setdefault(name, []).append(steps)
                logger.info("%s-%d: %.2f s per step", name, repetition, median(steps["seconds"][WARM_UP_STEPS:]))
    trainers = {name: _summary(runs) for name, runs in found.items()}
    report: Report = {"trainers": trainers, "plan": asdict(plan)}
    if plan.peer:
        padded = [runs[0]["losses"] for name, runs in found.items() if "padded" in name]
        pairs = [zip(found["sluice"][0]["losses"], losses, strict=True) for losses in padded]
        report["loss_difference"] = max(abs(ours - theirs) for each in pairs for ours, theirs in each)
        fastest = max(each["tokens_per_s"] for name, each in trainers.items() if name != "sluice")
        report["speedup"] = trainers["sluice"]["tokens_per_s"] / fastest
        report["trl"] = version("trl")
    return report


def _runs(workspace: Workspace, plan: Plan, repetition: int) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield each trainer's name, and of each step the seconds, the tokens and the loss."""
    run_id = f"sft-{repetition}"
    workspace.train("--run-id", run_id, f"runtime.num_threads={plan.threads}")
    steps = RunDirectory(workspace.folder / "runs" / run_id).metrics.steps()
    yield (
        "sluice",
        {
            "seconds": [step.seconds for step in steps],
            "tokens": [step.metrics["tokens"] for step in steps],
            "losses": [step.metrics["loss"] for step in steps],
        },
    )
    for accumulation in (1, 4) if plan.peer else ():
        rows = plan.rows // accumulation
        yield f"trl, padded, {rows} rows a forward", _trl(workspace, plan, rows, accumulation)
    if plan.peer:
        of_step = max(1, round(sum(step.metrics["tokens"] for step in steps) / len(steps) / plan.tokens))
        yield "trl, packed", _trl(workspace, plan, of_step, 1, packed=True)


def _trl(
    workspace: Workspace, plan: Plan, batch: int, accumulation: int, *, packed: bool = False
) -> dict[str, list[float]]:
    settings = {
        "model": str(workspace.folder / MODEL),
        "rows": str(workspace.folder / ROWS),
        "output": str(workspace.folder / "trl"),
        "threads": plan.threads or os.cpu_count() or 1,
        "steps": plan.steps,
        "lr": LEARNING_RATE,
        "batch": batch,
        "accumulation": accumulation,
        "packed": packed,
        "pack_tokens": plan.tokens,
    }
    return call_trl(["-c", PEER], settings)


def _summary(runs: list[dict[str, list[float]]]) -> dict[str, Any]:
    late = [{name: values[WARM_UP_STEPS:] for name, values in run.items()} for run in runs]
    pairs = [pair for run in late for pair in zip(run["tokens"], run["seconds"], strict=True)]
    return {
        "seconds_per_step": median(seconds for _, seconds in pairs),
        "tokens_per_s": median(tokens / seconds for tokens, seconds in pairs),
        "tokens_per_step": sum(tokens for tokens, _ in pairs) / len(pairs),
    }


def _write_inputs(workspace: Workspace, plan: Plan) -> None:
    """Write the model, texts whose lengths vary as those of chats do, and the config."""
    make_model(workspace.folder / MODEL, max_position_embeddings=4096, initializer_range=0.02, **size_of(plan.model))
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(plan.tokens / 5), 0.8, plan.rows * plan.steps), 8, plan.tokens - 1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz 0123456789"))
    texts = ("".join(random.choice(letters, int(length))) for length in lengths)
    (workspace.folder / ROWS).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (workspace.folder / "bench.toml").write_text(
        f'name = "sft"\nsteps = {plan.steps}\n[model]\npath = "{MODEL}"\n'
        f'[data]\ntrain_path = "{ROWS}"\nshuffle = false\n'
        f"[sft]\nnum_rows = {plan.rows}\nmax_tokens = {plan.tokens}\n[optim]\nlr = {LEARNING_RATE}\n"
    )


def render(report: Report) -> Group:
    """Return the report as a table and text."""
    rows = {
        name: {
            "s/step": each["seconds_per_step"],
            "tok/s": each["tokens_per_s"],
            "tokens/step": each["tokens_per_step"],
        }
        for name, each in report["trainers"].items()
    }
    notes = []
    if "speedup" in report:
        notes.append(f"sluice has {report['speedup']:.2f} times the tokens per second of TRL {report['trl']}'s fastest")
        notes.append(f"a step's loss differs by at most {report['loss_difference']:.1e} from that of padded steps")
    return table("steps of supervised fine-tuning: medians", rows, notes)


def is_passed(report: Report) -> bool:
    """Return whether the losses are the same."""
    return report.get("loss_difference", 0.0) <= SAME_LOSS


BENCHMARK = Benchmark(Plan(), QUICK, measure, render, is_passed)
