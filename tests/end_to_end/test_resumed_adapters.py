"""Runs whose engines compute with adapters as such: workers of both roles die; the weights are the same."""

import json

import pytest

from tests.support.engine_checks import NEEDS_VLLM
from tests.support.tiny import make_tiny_model
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

STEPS = 4
LORA = ("model.lora.rank=4", "model.lora.publish=adapters", "kl.coef=0.01", "eval.every_steps=2")
VLLM = ("rollout.kind=vllm", "rollout.cache_bytes=16777216", "rollout.temperature=0.8", "data.max_prompt_tokens=64")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("adapters-colocated", ("runtime.placement=colocated",)),
        pytest.param("adapters-vllm", VLLM, marks=NEEDS_VLLM),
    ],
)
def test_a_killed_run_ends_the_same(workplace: Workplace, name: str, settings: tuple[str, ...]) -> None:
    make_tiny_model(workplace.folder / "adapted", head_dim=32)
    config = ("train", "tiny.toml", f"steps={STEPS}", "model.path=adapted", *LORA, *settings)
    workplace.sluice(*config, "--run-id", name)
    expected, run = workplace.run(name), workplace.run(f"{name}-killed")
    driver = workplace.start(*config, "--run-id", run.run_id, "runtime.max_restarts=9")
    driver.wait_for(lambda: run.passed(1, "rollout"))
    assert workplace.kill_worker("RolloutWorker") == 1  # its successor starts with the base model
    driver.wait_for(lambda: run.passed(2, "rollout"))
    assert workplace.kill_worker("PolicyWorker") == 1  # its successor loads a checkpoint of adapters
    driver.finish()
    assert run.weights(STEPS) == expected.weights(STEPS) != expected.weights(STEPS - 1)
    assert run.step_metrics() == expected.step_metrics()
    lines = [json.loads(line) for line in (expected.path / "metrics.jsonl").read_text().splitlines()]
    sizes = [line["publish"]["num_bytes"] for line in lines if line.get("publish")]
    assert sizes
    base = (workplace.folder / "adapted" / "model.safetensors").stat().st_size
    assert max(sizes) < base  # of a colocated run, too: an engine that sleeps keeps its base
