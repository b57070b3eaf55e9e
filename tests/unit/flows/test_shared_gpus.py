"""`sluice plan` of colocated workers, and of a GPU that is too small for them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flows.plan.resources import Resources, plan_for_gpu
from schemas.config.load import load_config
from schemas.errors import gpu_bytes_in
from tests.support.command import Command, assert_rejected
from tests.unit.flows.test_resources import folder, plan, sluice, whole_bytes

__all__ = ["folder", "plan", "sluice"]  # fixtures

TRUNCATED = ("correction.kind=truncated",)
COLOCATED = (
    *("model.path=large", "runtime.placement=colocated", "runtime.num_policy_ranks=8", "rollout.num_workers=8"),
    *("rollout.kind=vllm", "model.gradient_checkpointing=true", "runtime.gradient_sync=every_micro_batch"),
)


def test_colocated_workers_that_take_turns_hold_nothing_in_a_phase_of_others(plan: Callable[..., Resources]) -> None:
    turns, stays = (
        plan(
            *("runtime.placement=colocated", "kl.coef=0.01"),
            f"runtime.max_staleness={stale}",
            *TRUNCATED,
            cluster="1xH100",
        )
        for stale in (0, 1)
    )
    whole = whole_bytes("model")
    policy, reference, engine = (worker.phases for worker in turns.workers)
    assert (policy.rollout, reference.rollout, reference.update, reference.publish) == (0, 0, 0, 0)
    assert (engine.scoring, engine.update, engine.publish) == (0, 0, whole)
    assert policy.publish - policy.load == stays.workers[0].phases.publish - stays.workers[0].phases.rollout
    assert turns.shared is not None
    assert turns.shared.load == max(engine.load, policy.load + reference.load)  # one after the other
    assert turns.shared.rollout == engine.rollout
    assert turns.shared.update == policy.update
    assert turns.host.parts["moved out of GPUs"] == 3 * whole + whole // 2  # the reference in bfloat16
    # One step off-policy, all of them compute at the same time.
    assert "moved out of GPUs" not in stays.host.parts
    assert stays.shared is not None
    assert stays.shared.rollout == sum(worker.phases.rollout for worker in stays.workers)


def test_of_a_gpu_too_small_the_largest_budget_that_fits_is_told(plan: Callable[..., Resources]) -> None:
    long = ("rollout.max_response_tokens=400", "data.max_prompt_tokens=16", "rollout.samples_per_prompt=8")
    config = load_config(Path("tiny.toml"), [*long, "runtime.placement=colocated", "packing.token_budget=4096"])
    fitting = plan(*long, "runtime.placement=colocated", "packing.token_budget=2080", cluster="1xH100")
    limit = fitting.limits[0]
    assert limit.where == "colocated, update"
    # As a run is told whose GPU was too small.
    full = f"CUDA out of memory. GPU 0 has a total capacity of {limit.used / 2**20:.2f} MiB of which 0 bytes is free."
    assert gpu_bytes_in(torch.OutOfMemoryError(full)) == pytest.approx(limit.used, rel=0.01)
    told = plan_for_gpu(config, limit.used)
    assert "GPU memory (colocated, update): the run needs" in told
    assert "; or with packing.token_budget=2080" in told
    assert "by the plan the run takes" in plan_for_gpu(config, 2**40)


def test_of_a_gpu_too_small_the_largest_share_for_the_engine_is_told(sluice: Command) -> None:
    arguments = ("--cluster", "8xH100", "runtime.max_staleness=1", *TRUNCATED, *COLOCATED)
    result = sluice(*arguments, "rollout.gpu_memory_utilization=0.95")
    told = "it fits with rollout.gpu_memory_utilization="
    assert_rejected(result, "GPU memory (colocated, ", told)
    share = float(result.err.partition(told)[2].partition(";")[0])
    assert sluice(*arguments, f"rollout.gpu_memory_utilization={share}").exit_code == 0
