"""Peak memory of a policy rank's phases against what `sluice plan` says of them."""

from pathlib import Path

import torch

from benchmarks.gpu.passes import peak_bytes, reset_peak
from benchmarks.gpu.results import CheckResult, Figure, Settings
from benchmarks.models import size_of
from flows.plan.footprint import measure_step
from flows.plan.resources import this_machine
from flows.plan.workers import ModelMemory, place, worker_memory
from infra.models.scoring import load_scoring_module
from infra.models.tiny import make_model
from rl_core.planning import plan_forward, plan_step
from rl_core.training import Trainer, score_rows
from schemas.config.run import RunConfig
from tests.support.configs import run_config
from tests.support.measured_memory import packed_rows
from tests.support.tiny import make_tiny_data

TOLERANCE = 0.15  # of the planned bytes
MODEL, TWIN_MODEL = "qwen3-0.6b", "tiny"
NUM_ROWS = 8  # in micro-batches of four
RESPONSE_TOKENS, TWIN_RESPONSE_TOKENS = 2000, 60


def check(settings: Settings, folder: Path) -> CheckResult:
    """Score and update with a model, and compare the peaks with the planned ones."""
    config = _config(settings, folder)
    planned, prompt_tokens = _plan(settings, config)
    measured = _measure(config, torch.device(settings.device), prompt_tokens)
    figures: dict[str, Figure] = {}
    missed = []
    for phase, num_bytes in measured.items():
        ratio = num_bytes / planned[phase]
        figures |= {
            f"{phase} planned MB": round(planned[phase] / 1e6),
            f"{phase} measured MB": round(num_bytes / 1e6),
            f"{phase} measured / planned": round(ratio, 3),
        }
        if abs(ratio - 1) > TOLERANCE and not settings.is_twin:
            missed.append(
                f"{phase} takes {ratio:.2f} times the planned memory, allowed are {TOLERANCE:.0%} more or less"
            )
    return CheckResult.of("memory", figures, missed)


def _config(settings: Settings, folder: Path) -> RunConfig:
    size = size_of(TWIN_MODEL if settings.is_twin else MODEL)
    make_model(folder / "model", max_position_embeddings=4096, initializer_range=0.02, **size)
    make_tiny_data(folder / "train.parquet", 4)
    responses = TWIN_RESPONSE_TOKENS if settings.is_twin else RESPONSE_TOKENS
    return run_config(
        folder,
        rollout={"num_prompts": 1, "samples_per_prompt": NUM_ROWS, "max_response_tokens": responses},
        packing={"token_budget": 4 * (responses + 16), "logits_chunk_tokens": 256},
        kl={"coef": 0.0},
        runtime={"device": settings.device, "placement": "colocated"},
    )


def _plan(settings: Settings, config: RunConfig) -> tuple[dict[str, int], int]:
    """Return the planned bytes of scoring and update, and the tokens of the longest prompt."""
    footprint = measure_step(config, 1.0)
    machine = this_machine() if not settings.is_twin else this_machine().replace(gpus_per_node=0)
    model = ModelMemory.of(config, footprint, on_gpus=not settings.is_twin)
    policy, *_ = worker_memory(config, footprint, model, machine, place(config, machine))
    return {phase: getattr(policy.phases, phase) for phase in ("scoring", "update")}, footprint.longest_prompt


def _measure(config: RunConfig, device: torch.device, prompt_tokens: int) -> dict[str, int]:
    """Return the peak bytes of scoring and of an update, above those of the process before it loads the model."""
    base = reset_peak(device)
    module, mesh = load_scoring_module(config, config.model, device, trains=True)
    trainer, responses = Trainer(module, config, mesh), [config.rollout.max_response_tokens] * NUM_ROWS
    prompts = [prompt_tokens] * NUM_ROWS
    rows, options = packed_rows(prompts, responses), {"num_ranks": 1, "token_budget": config.packing.token_budget}
    update = plan_step(prompts, responses, responses, num_updates=1, seed=0, **options).updates[0]
    trainer.update(rows, update)  # gradients and the optimizer's state exist from now on
    peaks = {}
    reset_peak(device)
    score_rows(module, rows, plan_forward(prompts, responses, **options).rank(0))
    peaks["scoring"] = peak_bytes(device) - base
    reset_peak(device)
    trainer.update(rows, update)
    peaks["update"] = peak_bytes(device) - base
    return peaks
