"""The seconds of a planned step, from a GPU's peak and a stated utilization, or from rates measured on this machine."""

import math

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from flows.plan.footprint import Footprint
from flows.plan.placement import Placement
from flows.plan.simulate import SimulatedStep
from flows.plan.traffic import Transfer
from flows.plan.workers import ModelMemory, engine_itemsize
from infra.models.load import build_meta_model
from rl_core.planning.hardware import Cluster
from rl_core.planning.memory import FLOAT_BYTES, HALF_BYTES
from rl_core.planning.throughput import ModelWork, num_decode_steps
from schemas.base import Frozen
from schemas.config.rollout import VllmRollout
from schemas.config.run import RunConfig
from schemas.errors import ConfigError


class Rates(Frozen):
    """What one worker does; without GPUs, what all workers of the machine do together."""

    source: str
    scoring_flops: PositiveFloat  # operations per second of a scoring pass
    update_flops: PositiveFloat  # of forward and backward
    decode_flops: PositiveFloat  # of decoding, which is bound by these or by
    decode_bandwidth: PositiveFloat  # bytes per second of weights and KV cache


class StepSeconds(Frozen):
    """The seconds of a step's parts. Rewards, evaluations and the driver are not included."""

    source: str
    rollout: NonNegativeFloat
    scoring: NonNegativeFloat  # behavior and reference log-probs
    update: NonNegativeFloat
    transfers: NonNegativeFloat  # that nothing hides
    overlapped: bool  # the rollout runs while the previous step is trained

    @property
    def compute(self) -> float:
        """Seconds that workers compute, if nothing overlaps."""
        return self.rollout + self.scoring + self.update

    @property
    def total(self) -> float:
        """Seconds of a step."""
        training = self.scoring + self.update + self.transfers
        return max(self.rollout, training) if self.overlapped else self.rollout + training

    @property
    def steps_per_hour(self) -> float:
        """Steps in 3600 seconds."""
        return 3600 / self.total


def peak_rates(config: RunConfig, cluster: Cluster, utilization: float) -> Rates | None:
    """Return a worker's rates at a fraction of its GPUs' published peaks; None if they are not known.

    What an engine with tensor parallelism sends between its GPUs is not counted.

    Raises:
        ConfigError: `utilization` is not above 0 and at most 1.
    """
    if not 0 < utilization <= 1:
        raise ConfigError(f"--utilization is {utilization}, expected a fraction of the peak above 0 and at most 1")
    if not cluster.peak_flops:
        return None
    train = cluster.peak_flops if config.model.dtype_on("cuda") == "bfloat16" else cluster.float32_flops
    decode = cluster.peak_flops if engine_itemsize(config, on_gpus=True) == HALF_BYTES else cluster.float32_flops
    engine = utilization * config.rollout.gpus_per_worker
    return Rates(
        source=f"{utilization:.0%} of the published peaks of {cluster.name}",
        scoring_flops=utilization * train,
        update_flops=utilization * train,
        decode_flops=engine * decode,
        decode_bandwidth=engine * cluster.memory_bandwidth,
    )


def step_seconds(
    config: RunConfig,
    footprint: Footprint,
    model: ModelMemory,
    rates: Rates,
    traffic: tuple[Transfer, ...],
    placement: Placement,
    cache: int,
    step: SimulatedStep,
) -> StepSeconds:
    """Return the seconds of a step; collectives overlap with computing, of which the slower counts.

    `cache` is the KV cache of one engine, in bytes.
    """
    prompts, responses = step.prompt_lengths, step.response_lengths
    work = ModelWork.of(build_meta_model(config.model))
    ranks = config.runtime.num_policy_ranks if placement.on_gpus else 1
    references = model.reference.num_ranks if model.reference and placement.on_gpus else ranks
    forward = work.forward(prompts, responses)
    scoring = forward / ranks / rates.scoring_flops if config.scores_behavior else 0.0
    if config.kl.coef:
        scoring += forward / references / rates.scoring_flops
    checkpointing = config.model.gradient_checkpointing
    update = work.update(prompts, responses, checkpointing=checkpointing) / ranks / rates.update_flops
    waits = {transfer.name: transfer.seconds or 0.0 for transfer in traffic}
    hidden = waits.pop("collectives", 0.0)
    exposed = max(0.0, hidden - scoring - update)
    return StepSeconds(
        source=rates.source,
        rollout=_rollout_seconds(config, work, model, rates, step.sampled(), placement, cache),
        scoring=scoring,
        update=update,
        transfers=math.fsum(waits.values()) + exposed,
        overlapped=config.runtime.max_staleness > 0 and placement.on_gpus and not placement.is_colocated,
    )


def decode_bytes(model: ModelMemory, num_rows: float, row_tokens: float) -> float:
    """Return the bytes that one decoding step reads: the weights, and the cache of every row."""
    return model.engine_itemsize * model.whole / FLOAT_BYTES + decode_cache_bytes(model, num_rows, row_tokens)


def decode_cache_bytes(model: ModelMemory, num_rows: float, row_tokens: float) -> float:
    """Return the KV cache of rows with this many tokens, in the engine's dtype."""
    return model.engine_itemsize * model.token_bytes * num_rows * row_tokens / FLOAT_BYTES


def _rollout_seconds(
    config: RunConfig,
    work: ModelWork,
    model: ModelMemory,
    rates: Rates,
    step: SimulatedStep,
    placement: Placement,
    cache: int,
) -> float:
    """Return the seconds of prefill and decoding, by steps that each read all weights once.

    Rows are decoded at the same time as far as the engine allows and `cache`, the bytes of its KV cache, holds them.
    Responses in parts are those of as many steps, of which each has one part; its history is prefilled again.
    """
    rollout, prompts, responses = config.rollout, step.prompt_lengths, step.response_lengths
    num_workers = rollout.num_workers if placement.on_gpus else 1
    num_parts = max(1, config.runtime.max_staleness)
    before = np.array([config.token_limit(num_parts - part) for part in range(num_parts)])[:, None]  # each part
    parts = np.clip(responses - before, 0, config.token_limit(num_parts - 1))
    rows = -(-int(np.count_nonzero(parts)) // num_workers)
    row_tokens = float(prompts.mean() + responses.mean() / 2)
    if isinstance(rollout, VllmRollout):
        concurrency = min(rows, rollout.max_num_seqs)
    else:
        concurrency = min(rows, num_parts * rollout.prompts_per_batch * rollout.samples_per_prompt)
    concurrency = min(concurrency, max(1, int(cache / decode_cache_bytes(model, 1, row_tokens))))
    slowest = np.sort(parts[parts > 0])[::-1][::num_workers]  # a fair share of the long ones
    num_steps = num_decode_steps(slowest, concurrency)
    live = int(slowest.sum()) / num_steps
    decode = max(
        work.decode_step(live, row_tokens) / rates.decode_flops,
        decode_bytes(model, live, row_tokens) / rates.decode_bandwidth,
    )
    prefill = work.forward(prompts, np.zeros_like(prompts)) / rollout.samples_per_prompt
    if num_parts > 1:
        histories = (prompts + before[1:])[parts[1:] > 0]
        prefill += work.forward(histories, np.zeros_like(histories))
    return num_steps * decode + prefill / num_workers / rates.decode_flops
