"""The planned memory of a policy rank is what a real one takes: a model of 27 million weights, on the CPU."""

from pathlib import Path
from typing import Any

import pytest

from flows.cli.footprint import measure_step
from flows.cli.resources import this_machine
from flows.cli.resources.placement import place
from flows.cli.resources.workers import ModelMemory, worker_memory
from infra.models.tiny import make_model
from tests.configs import run_config
from tests.measured_memory import measure
from tests.tiny import make_tiny_data, make_tiny_model, tiny_row

TOLERANCE = 0.15
MODEL = {
    "vocab_size": 16_384,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
RESPONSE_TOKENS, NUM_ROWS, TOKEN_BUDGET = 247, 8, 1024  # two micro-batches of four rows of 256 tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "changes"),
    [
        ({}, {}),
        ({"model": {"gradient_checkpointing": True}}, {}),
        ({"packing": {"logits_chunk_tokens": 1024}}, {"tie_word_embeddings": False}),
    ],
    ids=["plain", "checkpointing", "untied head in one chunk"],
)
def test_the_plan_is_within_15_percent_of_the_measured_peaks(
    sections: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    make_model(tmp_path / "model", **{**MODEL, **changes})
    make_tiny_data(tmp_path / "train.parquet", 4, row=lambda index: tiny_row(index))
    make_tiny_model(tmp_path / "tiny", vocab_size=16_384, max_position_embeddings=1024)
    config = run_config(
        tmp_path,
        model={"path": str(tmp_path / "model"), **sections.get("model", {})},
        rollout={"num_prompts": 1, "samples_per_prompt": NUM_ROWS, "max_response_tokens": RESPONSE_TOKENS},
        packing={"token_budget": TOKEN_BUDGET, "logits_chunk_tokens": 256, **sections.get("packing", {})},
    )
    footprint = measure_step(config, "uniform", 1.0)
    assert footprint.num_micros == 2
    machine = this_machine().replace(gpus_per_node=0)
    placement = place(config, machine)
    policy, *_ = worker_memory(config, footprint, ModelMemory.of(config, footprint, on_gpus=False), machine, placement)
    sizes = (footprint.longest_prompt, RESPONSE_TOKENS, NUM_ROWS)
    measured = measure(config, sizes, warm_up=tmp_path / "tiny")
    planned = {phase: getattr(policy.phases, phase) for phase in measured}
    assert planned == {phase: pytest.approx(num_bytes, rel=TOLERANCE) for phase, num_bytes in measured.items()}
    # The comparison is of activations, not just of the weights' multiples.
    if not config.model.gradient_checkpointing:
        assert policy.parts["activations"] > 0.3 * policy.phases.update
