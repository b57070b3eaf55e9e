"""Rates measured on this machine: one micro-batch is scored and trained, and a batch of responses is decoded."""

import time
from collections.abc import Callable

import numpy as np
import torch

from flows.plan.footprint import Footprint
from flows.plan.simulate import SimulatedStep
from flows.plan.speed import Rates, decode_bytes
from flows.plan.workers import ModelMemory
from infra.engines.base import GenerationRequest, Sampling, generate_all
from infra.engines.open import open_engine
from infra.models.load import build_meta_model, load_tokenizer
from infra.models.scoring import load_scoring_module
from infra.ray.device import choose_device, set_threads
from rl_core.planning.throughput import ModelWork
from rl_core.scoring import PackedRow, pack_row
from schemas.config.run import RunConfig

DECODE_STEPS = 16


def measure_rates(config: RunConfig, footprint: Footprint, model: ModelMemory, step: SimulatedStep) -> Rates:
    """Load the policy, then the rollout engine, in this process, and measure what they do.

    Args:
        config: The run.
        footprint: What its step takes.
        model: Its model.
        step: The step.

    Raises:
        UserError: The model's weights are not usable, or the engine can't run here.
    """
    set_threads(config.runtime.num_threads)
    work = ModelWork.of(build_meta_model(config.model))
    rows = list(footprint.plan.updates[0].rank(0)[0].rows)  # the costliest micro-batch comes first
    prompts, responses = step.prompt_lengths[rows], step.response_lengths[rows]
    scoring, update = _train_seconds(config, step, rows)
    decode, num_rows, tokens = _decode_seconds(config, step)
    checkpointing = config.model.gradient_checkpointing
    return Rates(
        source=f"one micro-batch of {int((prompts + responses).sum()):,} tokens, measured on this machine's "
        f"{choose_device().type.upper()}",
        scoring_flops=work.forward(prompts, responses) / scoring,
        update_flops=work.update(prompts, responses, checkpointing=checkpointing) / update,
        decode_flops=work.decode_step(num_rows, tokens) / decode,
        decode_bandwidth=decode_bytes(model, num_rows, tokens) / decode,
    )


def _train_seconds(config: RunConfig, step: SimulatedStep, rows: list[int]) -> tuple[float, float]:
    """Return the seconds of scoring and of training the micro-batch of these rows."""
    device = choose_device()
    module, _ = load_scoring_module(config, config.model, device, trains=True)
    row = _random_row(step, rows, module.model.config.get_text_config().vocab_size).to(device)

    def score() -> None:
        with torch.no_grad():
            module(row)

    def train() -> None:
        module(row, entropy="no_grad").logprobs.mean().backward()

    return _seconds(score, device), _seconds(train, device)


def _decode_seconds(config: RunConfig, step: SimulatedStep) -> tuple[float, int, float]:
    """Return the seconds of a decoding step, its rows, and the tokens of a row half way through its response."""
    rollout, tokenizer = config.rollout, load_tokenizer(config.model)
    engine = open_engine(config, tokenizer)
    samples = rollout.samples_per_prompt
    prompts = step.sampled().prompts[::samples][: rollout.prompts_per_batch]
    seeds = tuple(range(samples))
    requests = [GenerationRequest(prompt.prompt_ids, seeds) for prompt in prompts]
    device = choose_device()
    few, many = (
        Sampling(max_response_tokens=count) for count in (1, min(1 + DECODE_STEPS, rollout.max_response_tokens))
    )
    started = _seconds(lambda: generate_all(engine, requests, few), device)
    finished = _seconds(lambda: generate_all(engine, requests, many), device)
    engine.close()
    num_steps = max(1, many.max_response_tokens - 1)
    num_rows = len(prompts) * samples
    tokens = float(np.mean([len(prompt.prompt_ids) for prompt in prompts])) + num_steps / 2
    return max(finished - started, 1e-9) / num_steps, num_rows, tokens


def _random_row(step: SimulatedStep, rows: list[int], vocab_size: int) -> PackedRow:
    responses = torch.from_numpy(step.response_lengths[rows])
    prompts = [torch.from_numpy(np.asarray(step.prompts[row].prompt_ids, dtype=np.int64)) for row in rows]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.randint(vocab_size, (int(responses.sum()),), generator=torch.Generator().manual_seed(0))
    return pack_row(torch.cat(prompts), lengths, ids, responses)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call; on a GPU, of the second one, as the first one chooses kernels."""
    if device.type == "cuda":
        run()
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
