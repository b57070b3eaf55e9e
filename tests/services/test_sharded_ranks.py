"""Ranks as processes: what each holds of the weights, and one gradient for every number of ranks and every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from flows.plan.footprint import measure_step
from flows.plan.resources import this_machine
from flows.plan.workers import ModelMemory, place, worker_memory
from infra.models.tiny import make_model
from tests.services.test_planned_memory import MODEL
from tests.support.configs import merge, run_config
from tests.support.sharded_ranks import NUM_EXPERTS, PROMPT_TOKENS, Case, response_tokens, run_cases
from tests.support.tiny import make_tiny_data, make_tiny_model, make_tiny_moe

BFLOAT16_BOUND = 0.02  # of a parameter's gradient norm; one rounding of a gradient's element is up to 2^-9 of it
HALF = {"model": {"compute_dtype": "bfloat16"}}
REPLICAS = {"runtime": {"num_policy_replicas": 2}}
REPLAY = {"rollout": {"max_response_tokens": 16, "router_replay": True}}
SHARED = {"packing": {"share_prompts": True}}
LORA = {"lora": {"rank": 2}}
MUON = {"kind": "muon"}
CLIP_COV = {"loss": {"kind": "clip_cov", "share": 0.2, "cov_low": 0.02, "cov_high": 0.9}}
KL_COV = {"loss": {"kind": "kl_cov", "share": 0.2}, "optim": {"updates_per_step": 2}}
BUFFERS = 8 * 2**20  # of the process itself; all weights would be 78 MiB more than a shard
CHUNKS = {"packing": {"logits_chunk_tokens": 256}}
# Ranks, sections and token budget; few CPUs compute bfloat16 themselves, hence the smaller one.
MEASURED: dict[str, tuple[int, dict[str, Any], int]] = {
    "large": (4, CHUNKS, 512),
    "large, muon": (2, CHUNKS | {"optim": MUON}, 512),
    "large, half, each": (2, CHUNKS | HALF | {"runtime": {"gradient_sync": "every_micro_batch"}}, 192),
}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks, token budget, sections
    "one": (1, 64, {}),
    "two": (2, 24, {}),
    "two, each": (2, 24, {"runtime": {"gradient_sync": "every_micro_batch"}}),
    "two replicas of two": (4, 24, REPLICAS),
    "two, shared": (2, 24, SHARED),
    "four, shared": (4, 24, SHARED),
    "one, half": (1, 64, HALF),
    "two, half": (2, 24, HALF),
    "two, half, shared": (2, 24, HALF | SHARED),
    "two, half, each": (2, 24, HALF | {"runtime": {"gradient_sync": "every_micro_batch"}}),
    "two replicas of two, half": (4, 24, HALF | REPLICAS),
    "two, half, checkpointing": (2, 24, {"model": HALF["model"] | {"gradient_checkpointing": True}}),
    "one, adapter": (1, 64, {"model": LORA}),
    "two, adapter": (2, 24, {"model": LORA}),
    "two, adapter, half": (2, 24, {"model": LORA | HALF["model"]}),
    "one, experts": (1, 64, REPLAY),
    "two, experts": (2, 24, REPLAY),
    "two, experts, shared": (2, 24, REPLAY | SHARED),
    "two, experts, checkpointing": (2, 24, REPLAY | {"model": {"gradient_checkpointing": True}}),
    "two, fused": (2, 24, {"optim": {"implementation": "fused"}}),
    "two, offload": (2, 24, {"optim": {"offload": True}}),
    "one, muon": (1, 64, {"optim": MUON}),
    "two, muon": (2, 24, {"optim": MUON}),
    "four, muon": (4, 24, {"optim": MUON}),
    "two replicas of two, muon": (4, 24, REPLICAS | {"optim": MUON}),
    "two, muon, offload": (2, 24, {"optim": MUON | {"offload": True}}),
    "three, muon, offload": (3, 24, {"optim": MUON | {"offload": True}}),
    "one, experts, muon": (1, 64, REPLAY | {"optim": MUON}),
    "two, experts, muon": (2, 24, REPLAY | {"optim": MUON}),
    "one, clip_cov": (1, 64, CLIP_COV),
    "three, clip_cov": (3, 24, CLIP_COV),
    "one, kl_cov": (1, 64, KL_COV),
    "three, kl_cov": (3, 24, KL_COV),
    "four, shared, kl_cov": (4, 24, SHARED | KL_COV),
}

# Bytes of a step's parts: a layer's first three matrices have as many on the first two of three ranks, but not on the
# last one.
PARTS = {"three, muon, offload": 1400}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all layouts, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny, moe = str(make_tiny_model(folder / "tiny")), str(make_tiny_moe(folder / "moe", num_experts=NUM_EXPERTS))
    cases = [
        Case(name, moe if "experts" in name else tiny, ranks, sections, budget, PARTS.get(name))
        for name, (ranks, budget, sections) in LAYOUTS.items()
    ]
    run_cases(folder, cases)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ranks of a larger model measured."""
    folder = tmp_path_factory.mktemp("large")
    model = str(make_model(folder / "model", **MODEL))
    warm_up = str(make_tiny_model(folder / "warm_up", vocab_size=MODEL["vocab_size"]))
    cases = [Case(name, model, *values, warm_up=warm_up) for name, values in MEASURED.items()]
    run_cases(folder, cases)
    return folder


def gradient(folder: Path, name: str) -> dict[str, Tensor]:
    return _part(folder, name, "gradient/")


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the largest norm of a parameter's difference, relative to the parameter's norm."""
    assert first.keys() == second.keys()
    return max(
        float((first[name] - second[name]).norm() / norm) for name in first if (norm := first[name].norm()) > 1e-12
    )


@pytest.mark.parametrize("name", ["two", "two, each", "two replicas of two", "two, shared", "four, shared"])
def test_float32_gradients_are_equal_for_every_layout(folder: Path, name: str) -> None:
    assert distance(gradient(folder, "one"), gradient(folder, name)) < 1e-6


@pytest.mark.parametrize("name", ["three, clip_cov", "three, kl_cov", "four, shared, kl_cov"])
def test_tokens_are_selected_over_all_ranks(folder: Path, name: str) -> None:
    # Another token would be 1e-2 of the gradient, or more.
    assert distance(gradient(folder, f"one, {name.split(', ')[-1]}"), gradient(folder, name)) < 1e-5


@pytest.mark.parametrize("name", ["two, half", "two, half, each", "two replicas of two, half", "two, half, shared"])
def test_bfloat16_gradients_are_equal_within_their_bound(folder: Path, name: str) -> None:
    assert distance(gradient(folder, "one, half"), gradient(folder, name)) < BFLOAT16_BOUND


def test_checkpointing_changes_no_gradient(folder: Path) -> None:
    assert distance(gradient(folder, "two, half"), gradient(folder, "two, half, checkpointing")) == 0


@pytest.mark.parametrize("name", ["two, experts", "two, experts, checkpointing", "two, experts, shared"])
def test_gradients_through_replayed_routers_are_equal_for_every_layout(folder: Path, name: str) -> None:
    expected = gradient(folder, "one, experts")
    assert all(values.any() for name, values in expected.items() if name.endswith("mlp.gate.weight"))
    assert distance(expected, gradient(folder, name)) < 1e-6


def test_adapters_start_and_train_alike_for_every_number_of_ranks(folder: Path) -> None:
    expected = gradient(folder, "one, adapter")
    assert expected
    assert all(".lora_" in name for name in expected)
    assert distance(expected, gradient(folder, "two, adapter")) < 1e-6
    assert distance(expected, gradient(folder, "two, adapter, half")) < 0.2  # of another function: rounded weights


def test_fused_and_offloaded_optimizers_step_alike(folder: Path) -> None:
    expected = _part(folder, "two", "new/")
    assert distance(expected, _part(folder, "two, fused", "new/")) < 1e-6
    assert distance(expected, _part(folder, "two, offload", "new/")) == 0


@pytest.mark.parametrize("name", ["two, muon", "four, muon", "two replicas of two, muon", "two, experts, muon"])
def test_muon_steps_alike_for_every_number_of_ranks(folder: Path, name: str) -> None:
    alone = _part(folder, "one, experts, muon" if "experts" in name else "one, muon", "new/")
    assert distance(alone, _part(folder, name, "new/")) < 1e-6
    assert distance(alone, _part(folder, "one, experts" if "experts" in name else "one", "new/")) > 1e-3  # AdamW's


def test_muon_steps_alike_if_its_momentum_is_offloaded(folder: Path) -> None:
    assert distance(_part(folder, "two, muon", "new/"), _part(folder, "two, muon, offload", "new/")) == 0
    assert distance(_part(folder, "one, muon", "new/"), _part(folder, "three, muon, offload", "new/")) < 1e-6


def test_attention_receives_the_compute_dtype(folder: Path) -> None:
    """Which CUDA's kernel needs: with an autocast, rotary positions made queries and keys float32."""
    assert measured(folder, "one, half")["attention"] == ["torch.bfloat16"]
    assert measured(folder, "two")["attention"] == ["torch.float32"]


def test_collectives_are_measured_as_a_part_of_forward_and_backward(folder: Path) -> None:
    for name in ("two", "two, each", "two replicas of two"):
        seconds = measured(folder, name)["seconds"]
        assert seconds.keys() == {"forward", "backward", "collectives", "optimizer"}
        assert 0 < seconds["collectives"] < seconds["forward"] + seconds["backward"]


@pytest.mark.extended
def test_a_rank_needs_memory_for_its_shard_and_a_layer(large: Path) -> None:
    whole = (large / "model/model.safetensors").stat().st_size
    layer = 4 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1536)
    for rank in range(4):
        peak = measured(large, "large", rank)["load"]
        assert whole / 4 < peak < whole / 4 + layer + BUFFERS


@pytest.mark.extended
@pytest.mark.parametrize("name", MEASURED)
def test_the_plan_of_several_ranks_is_near_the_measured_peaks(large: Path, name: str) -> None:
    ranks, sections, budget = MEASURED[name]
    base = {
        "model": {"path": str(large / "model")},
        "data": {"max_prompt_tokens": PROMPT_TOKENS},
        "rollout": {"num_prompts": 4, "samples_per_prompt": 4, "max_response_tokens": response_tokens(budget)},
        "packing": {"token_budget": budget},
        "runtime": {"num_policy_ranks": ranks},
    }
    config = run_config(large, **merge(base, sections))
    make_tiny_data(large / "train.parquet", 4)
    footprint, machine = measure_step(config, 1.0), this_machine().replace(gpus_per_node=0)
    model = ModelMemory.of(config, footprint, on_gpus=False)
    policy, *_ = worker_memory(config, footprint, model, machine, place(config, machine))
    peaks = measured(large, name)
    planned = {phase: getattr(policy.phases, phase) for phase in peaks}
    assert planned == {phase: pytest.approx(num_bytes, rel=0.25) for phase, num_bytes in peaks.items()}


def measured(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}-{rank}.json").read_text())
    return found


def _part(folder: Path, name: str, prefix: str) -> dict[str, Tensor]:
    tensors = load_file(folder / f"{name}.safetensors")
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
