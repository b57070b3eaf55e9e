"""The planned memory of a policy rank is what a real one takes: a model of 27 million weights, on the CPU."""

from pathlib import Path
from typing import Any

import pytest

from flows.plan.footprint import measure_step
from flows.plan.resources import this_machine
from flows.plan.workers import ModelMemory, place, worker_memory
from infra.models.tiny import make_model
from schemas.config.run import RunConfig
from tests.support.configs import run_config
from tests.support.measured_memory import measure
from tests.support.tiny import make_tiny_data, make_tiny_model, tiny_row

pytestmark = pytest.mark.extended

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


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changes of the config's sections and of the model
    "plain": ({}, {}),
    "checkpointing": ({"model": {"gradient_checkpointing": True}}, {}),
    "untied head in one chunk": ({"packing": {"logits_chunk_tokens": 1024}}, {"tie_word_embeddings": False}),
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    folder = tmp_path_factory.mktemp("planned")
    make_tiny_data(folder / "train.parquet", 4, row=lambda index: tiny_row(index))
    return {name: config_of(folder, name) for name in VARIANTS}


def config_of(folder: Path, name: str) -> RunConfig:
    """Return a variant's config; make its model."""
    sections, changes = VARIANTS[name]
    make_model(folder / name, **{**MODEL, **changes})
    return run_config(
        folder,
        model={"path": str(folder / name), **sections.get("model", {})},
        rollout={"num_prompts": 1, "samples_per_prompt": NUM_ROWS, "max_response_tokens": RESPONSE_TOKENS},
        packing={"token_budget": TOKEN_BUDGET, "logits_chunk_tokens": 256, **sections.get("packing", {})},
    )


@pytest.fixture(scope="module")
def measured(configs: dict[str, RunConfig], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """The measured peaks of each variant, by phase."""
    tiny = make_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=16_384, max_position_embeddings=1024)
    sizes = (measure_step(configs["plain"], 1.0).longest_prompt, RESPONSE_TOKENS, NUM_ROWS)
    return dict(zip(configs, measure(list(configs.values()), sizes, warm_up=tiny), strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_plan_is_within_15_percent_of_the_measured_peaks(
    configs: dict[str, RunConfig], measured: dict[str, dict[str, int]], name: str
) -> None:
    config = configs[name]
    footprint = measure_step(config, 1.0)
    assert footprint.num_micros == 2
    machine = this_machine().replace(gpus_per_node=0)
    placement = place(config, machine)
    policy, *_ = worker_memory(config, footprint, ModelMemory.of(config, footprint, on_gpus=False), machine, placement)
    planned = {phase: getattr(policy.phases, phase) for phase in measured[name]}
    assert planned == {phase: pytest.approx(num_bytes, rel=TOLERANCE) for phase, num_bytes in measured[name].items()}
    # The comparison is of activations, not just of the weights' multiples.
    if not config.model.gradient_checkpointing:
        assert policy.parts["activations"] > 0.3 * policy.phases.update
