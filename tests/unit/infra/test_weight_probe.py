"""The probe of an engine after a load, and what is sent of a policy with adapters."""

import pytest
import ray
import torch

from infra.engines.base import Sampling, generate_all
from infra.engines.embedded.engine import TransformersEngine
from infra.models.flat_tensors import tensor_specs
from infra.models.load import load_model
from infra.models.lora import changing_names, merged_weights
from infra.weights.buckets import sent_bytes, with_whole_blocks
from infra.weights.probe import check_probe, score_probe
from rl_core.training import ScoringModule
from schemas.config.model import LoraConfig
from schemas.config.run import RunConfig
from schemas.errors import StaleWeightsError, WeightsError
from schemas.weights import WeightsHandle
from tests.support.configs import run_config
from tests.support.engine_checks import PROMPTS, assert_identical, request
from tests.support.policies import load_policy
from tests.support.tiny import make_tiny_model
from tests.support.weight_tensors import RUN, bucket_of, load_state, same


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return run_config(model={"path": str(folder)}, rollout={"temperature": 0.7})


def probed(
    config: RunConfig, change: dict[str, torch.Tensor] | None = None
) -> tuple[TransformersEngine, WeightsHandle]:
    """Return an engine with some weights changed, and the handle that a trainer of the unchanged ones sends."""
    policy = load_policy(config.model)
    module = ScoringModule(policy, config.packing, config.rollout.temperature)
    probe = score_probe(module, config, "float32")
    handle = WeightsHandle(
        run_id=RUN, version=1, tensors=tensor_specs(dict(policy.named_parameters())), bucket_bytes=64, probe=probe
    )
    engine = TransformersEngine(load_model(config.model))
    load_state(engine, dict(engine.model.named_parameters()) | (change or {}), 1)
    return engine, handle


def test_the_probe_passes_with_the_trainers_weights_and_changes_no_sample(config: RunConfig) -> None:
    engine, handle = probed(config)
    requests = [request(prompt, 1, 2) for prompt in PROMPTS]
    before = generate_all(engine, requests, Sampling(12))
    difference = check_probe(engine, handle)
    assert difference is not None
    assert difference < 1e-5
    assert_identical(generate_all(engine, requests, Sampling(12)), before)
    assert engine.version == 1
    assert check_probe(engine, handle.replace(probe=None)) is None


@pytest.mark.parametrize("number", range(0, 25, 4))
def test_one_stale_tensor_fails_the_probe(config: RunConfig, number: int) -> None:
    parameters = list(load_model(config.model).named_parameters())
    name, tensor = parameters[number % len(parameters)]
    change = tensor + 0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    engine, handle = probed(config, {name: change})
    was_initialized = ray.is_initialized()
    with pytest.raises(StaleWeightsError, match=r"TransformersEngine .* version 1 of run weights, but its log-probs"):
        check_probe(engine, handle)
    assert engine.version is None
    assert ray.is_initialized() == was_initialized  # naming the worker starts no cluster


def test_an_engine_of_another_function_is_not_blamed_on_its_weights(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, handle = probed(config)
    score = engine.score
    monkeypatch.setattr(engine, "score", lambda token_ids, temperature: score(token_ids, 2 * temperature))
    with pytest.raises(StaleWeightsError, match=r"its weights are right, .* another function of this model"):
        check_probe(engine, handle)
    assert engine.version is None


def test_diverged_weights_fail_the_probe(config: RunConfig) -> None:
    engine, handle = probed(config, {"model.norm.weight": torch.full((16,), torch.nan)})
    with pytest.raises(StaleWeightsError, match="by nan nats"):
        check_probe(engine, handle)


def test_frozen_weights_are_not_sent_again_and_the_engine_holds_the_same_bits(config: RunConfig) -> None:
    """Adapters of attention's projections alone: what a receiver that holds a version is sent, and what it then has."""
    lora = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj"))
    policy = load_policy(config.model.replace(lora=lora))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    merged = merged_weights(policy)
    changed = with_whole_blocks(merged, changing_names(policy))
    assert all(".self_attn." in name for name in changed)
    specs = tensor_specs(changed)
    assert sent_bytes(specs, 2**20) < 0.5 * sent_bytes(tensor_specs(merged), 2**20)
    engine = TransformersEngine(load_model(config.model))
    engine.load_weights(specs, [bucket_of(changed)], 1, is_complete=False)
    assert same(dict(engine.model.named_parameters()), merged)
    engine.version = None  # as after a load that failed
    with pytest.raises(WeightsError, match="without a version was sent changed weights only"):
        engine.load_weights(specs, [bucket_of(changed)], 1, is_complete=False)


def test_a_full_policy_changes_in_all_weights(config: RunConfig) -> None:
    policy = load_policy(config.model)
    weights = merged_weights(policy)
    assert list(with_whole_blocks(weights, changing_names(policy))) == list(weights)
