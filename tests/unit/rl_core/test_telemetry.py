"""Measurements as metrics: operations by hand, utilization, parts of an update, and how full a plan is."""

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, PretrainedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto import AutoModelForCausalLM

from rl_core.planning import plan_step
from rl_core.planning.hardware import gpu_peak_flops
from rl_core.planning.throughput import ModelWork
from rl_core.telemetry import memory, micro_batch_seconds, packing, take_peak_memory, throughput
from rl_core.training.stopwatch import Stopwatch
from schemas.metric_catalog import find_metric
from schemas.metrics import Metrics, merge_metrics, values

CPU = torch.device("cpu")
PROMPTS, RESPONSES = np.array([1, 3]), np.array([2, 2])  # rows of 3 and 5 tokens, 4 of them scored
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def work_of(config: PretrainedConfig) -> ModelWork:
    with torch.device("meta"):
        return ModelWork.of(AutoModelForCausalLM.from_config(config))


def test_operations_of_a_dense_model() -> None:
    work = work_of(Qwen3Config(**SIZES))
    # Per layer: queries and outputs of 64 * 64, keys and values of 64 * 32, and three of 64 * 176.
    linear = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176)
    # Packed: the attention of each row by itself, 4 * 64 * length^2 / 2 per layer.
    attention = 2 * 2 * 64 * (3**2 + 5**2)
    forward = 2 * linear * 8 + 2 * 100 * 64 * 4 + attention
    assert work.forward(PROMPTS, RESPONSES) == forward
    assert work.update(PROMPTS, RESPONSES, checkpointing=False) == 3 * forward
    # Under adapters, the weights get no gradients; the attention has none.
    frozen = work.update(PROMPTS, RESPONSES, checkpointing=False, is_frozen=True)
    assert frozen == 2 * forward + attention
    # Of two samples of a prompt of 3 tokens, one shares it: 3 tokens less, and their attention to each other.
    same, ones, less = np.array([3, 3]), np.array([1, 1]), 2 * linear * 3 + 2 * 2 * 64 * 3**2
    assert work.forward(same, ones) - work.forward(same, ones, num_shared=3) == less
    trained = [work.update(same, ones, checkpointing=True, num_shared=shared) for shared in (0, 3)]
    assert trained[0] - trained[1] == 4 * less


def test_operations_of_experts_are_those_of_the_active_ones() -> None:
    work = work_of(Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32))
    # Per layer: attention as above, the router of 64 * 8, and two experts of 3 * 64 * 32.
    assert work.decoder_weights == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 64 * 8 + 2 * 3 * 64 * 32)


def test_latent_attention_has_heads_of_two_widths() -> None:
    own = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 12}
    shared = {name: value for name, value in SIZES.items() if name != "head_dim"}
    work = work_of(DeepseekV3Config(**shared, **own, first_k_dense_replace=2))
    assert work.attention_width == 2 * 4 * (16 + 12) / 2


def test_operations_of_generation_compute_a_prompt_once() -> None:
    work = ModelWork(decoder_weights=10, head_weights=5, attention_width=1)
    # Two responses, of 1 and 2 tokens, to one prompt of 3: 3 + 1 + 2 tokens, 3 of them scored. The prompt's attention
    # is 2 * 3^2; a response's is that of the whole row without the prompt's.
    attention = 2 * 3**2 + 2 * (4**2 - 3**2) + 2 * (5**2 - 3**2)
    assert work.generate(np.array([3, 3]), np.array([1, 2]), 2) == 2 * 10 * 6 + 2 * 5 * 3 + attention


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "float32", 67e12),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA H100 PCIe", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "float8_e4m3fn", None),
    ],
)
def test_peaks_of_gpus(name: str, dtype: str, peak: float | None) -> None:
    assert gpu_peak_flops(name, dtype) == peak


def test_workers_are_weighted_by_their_time() -> None:
    parts = [throughput("update", 100, 1.0, 30.0, 100.0), throughput("update", 500, 4.0, 70.0, 100.0)]
    assert values(merge_metrics(parts)) == {"step/update_tokens_per_second": 600 / 5, "step/update_mfu": 100 / 500}
    assert "step/update_mfu" not in throughput("update", 100, 1.0, 30.0, None)


def test_seconds_per_micro_batch_are_the_mean_and_the_slowest_ranks() -> None:
    ranks = [micro_batch_seconds({"forward": 4.0}, 4), micro_batch_seconds({"forward": 10.0}, 4)]
    expected = {"update/forward_seconds": 14 / 8, "update/forward_seconds_max": 2.5}
    assert values(merge_metrics(ranks)) == expected


def test_packing_of_a_plan() -> None:
    lengths = np.array([4, 4, 2])
    plan = plan_step(lengths, lengths, lengths, num_updates=1, num_ranks=2, token_budget=16, seed=0)
    [update] = plan.updates
    found = values(packing(plan))
    assert found["packing/fill"] == 20 / (2 * update.num_micros * 16)
    assert found["packing/imbalance"] == update.imbalance > 0


def test_a_stopwatch_measures_while_it_runs() -> None:
    watch = Stopwatch(CPU)
    with watch("before"):
        pass
    with watch.running(), watch("outer"), watch("inner"):
        pass
    first, second = watch.take(), watch.take()
    assert list(first) == ["inner", "outer"]
    assert 0 < first["inner"] < first["outer"]
    assert second == {}


def test_measurements_are_in_the_catalog_with_their_reduction() -> None:
    lengths = np.array([4])
    plan = plan_step(lengths, lengths, lengths, num_updates=1, num_ranks=1, token_budget=16, seed=0)
    made: Metrics = {
        **throughput("update", 1, 1.0, 1.0, 1.0),
        **micro_batch_seconds({"optimizer": 1.0}, 1),
        **packing(plan),
        **memory("policy-0", {**take_peak_memory(CPU), "allocated": 1, "reserved": 1}),
    }
    for name, metric in made.items():
        spec, _ = find_metric(name)
        assert (spec.stage, spec.reduction) == ("step", metric.kind), name
    names = {find_metric(name)[0].name for name in made}
    assert len(names) == len(made)
    assert find_metric("memory/policy-0_rss_bytes")[1] == {"worker": "policy-0"}
    assert made["memory/policy-0_rss_bytes"].value > 2**20
