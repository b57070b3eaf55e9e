"""Engines that compute with a policy's adapters as such: what they are sent, and what they then compute."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from infra.engines.base import RolloutEngine, Sampling, generate_all
from infra.engines.open import open_engine
from infra.engines.vllm.start import check_adapters
from infra.models.flat_tensors import tensor_specs
from infra.models.load import load_tokenizer
from infra.models.lora import is_adapter, merged_weights, published_weights
from infra.storage.shared_memory import choose_root
from infra.weights.buckets import changing_weights, sent_bytes
from schemas.config.model import ModelConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, WeightsError
from tests.support.configs import run_config
from tests.support.engine_checks import (
    ENGINE_PYTHON,
    HEAD_DIM,
    NEEDS_VLLM,
    PROMPTS,
    assert_identical,
    assert_logprobs,
    plain_logprobs,
    request,
)
from tests.support.policies import load_policy
from tests.support.tiny import make_tiny_model, make_tiny_moe
from tests.support.weight_tensors import bucket_of

LORA = {"rank": 4, "alpha": 12, "publish": "adapters", "target_modules": ["q_proj", "v_proj", "down_proj"]}
VLLM = {"kind": "vllm", "python": ENGINE_PYTHON, "cache_bytes": 2**22}
ENGINES = {
    "transformers": {"kind": "transformers"},
    "vllm": VLLM,
    "vllm, two ranks": VLLM | {"tensor_parallel": 2},
}
SAMPLING = Sampling(24, 0.7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), head_dim=HEAD_DIM)


def config_of(folder: Path, rollout: dict[str, object], root: Path) -> RunConfig:
    return run_config(model={"path": str(folder), "lora": LORA}, rollout=rollout, runtime={"shared_memory": str(root)})


@pytest.fixture(
    scope="module",
    params=[
        "transformers",
        pytest.param("vllm", marks=NEEDS_VLLM),
        pytest.param("vllm, two ranks", marks=[NEEDS_VLLM, pytest.mark.extended]),
    ],
)
def started(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RolloutEngine, Path]]:
    """An engine with version 0, and the folder through which it gets adapters."""
    root = tmp_path_factory.mktemp("shared")
    config = config_of(folder, ENGINES[request.param], root)
    engine = open_engine(config, load_tokenizer(config.model))
    yield engine, root
    engine.close()


def policy_of(folder: Path, seed: int) -> PreTrainedModel:
    """Return a policy whose adapters have been trained; of seed 0, new ones, with which it computes as its base."""
    model = load_policy(ModelConfig(path=str(folder), lora=LORA))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name) and seed:
                parameter.normal_(0, 0.3, generator=generator)
    return model


def publish(engine: RolloutEngine, policy: PreTrainedModel, version: int, *, is_complete: bool) -> None:
    """Load a policy's weights in two buckets."""
    weights = published_weights(policy, as_adapters=True)
    sent = weights if is_complete else changing_weights(weights, policy, as_adapters=True)
    half = len(sent) // 2
    buckets = (bucket_of(dict(list(sent.items())[part])) for part in (slice(half), slice(half, None)))
    engine.load_weights(tensor_specs(sent), buckets, version, is_complete=is_complete)


def assert_engine_is(engine: RolloutEngine, policy: PreTrainedModel) -> None:
    """Check samples' log-probs, and those of given tokens, against the policy's."""
    for row, generation in enumerate(generate_all(engine, [request(p, 1, 2) for p in PROMPTS], SAMPLING)):
        expected = plain_logprobs(policy, PROMPTS[row // 2], generation.token_ids, 0.7)
        assert_logprobs(generation, expected, tolerance=2e-5)
    tokens = np.array(PROMPTS[1])
    expected = plain_logprobs(policy, PROMPTS[1][:1], tokens[1:], 0.7)
    np.testing.assert_allclose(engine.score(tokens, 0.7), expected, atol=2e-5)


def test_an_engine_computes_with_the_adapters_of_its_version(started: tuple[RolloutEngine, Path], folder: Path) -> None:
    engine, root = started
    versions = [policy_of(folder, seed) for seed in (0, 1, 2)]
    requests = [request(prompt, 1, 2) for prompt in PROMPTS]
    publish(engine, versions[0], 0, is_complete=False)
    assert_engine_is(engine, versions[0])
    for version in (1, 2):
        publish(engine, versions[version], version, is_complete=False)
        assert engine.version == version
        assert_engine_is(engine, versions[version])
    assert not list(choose_root(str(root), 0).glob("*/adapter*"))
    last = generate_all(engine, requests, SAMPLING)
    publish(engine, versions[1], 1, is_complete=False)
    assert_engine_is(engine, versions[1])
    publish(engine, versions[2], 2, is_complete=False)
    assert_identical(generate_all(engine, requests, SAMPLING), last)


def test_an_engine_without_a_version_needs_the_base_too(started: tuple[RolloutEngine, Path], folder: Path) -> None:
    engine, _ = started
    policy, requests = policy_of(folder, 3), [request(prompt, 1, 2) for prompt in PROMPTS]
    publish(engine, policy, 3, is_complete=False)
    before = generate_all(engine, requests, SAMPLING)
    engine.version = None  # as after a load that failed
    with pytest.raises(WeightsError, match="without a version was sent changed weights only"):
        publish(engine, policy, 3, is_complete=False)
    publish(engine, policy, 3, is_complete=True)
    assert_identical(generate_all(engine, requests, SAMPLING), before)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if not is_adapter(name):
                parameter.mul_(1.1)
    publish(engine, policy, 4, is_complete=True)  # the base is replaced beneath the adapters
    assert_engine_is(engine, policy)
    publish(engine, policy_of(folder, 0), 0, is_complete=True)


def test_an_engine_that_slept_has_its_version_and_base(started: tuple[RolloutEngine, Path], folder: Path) -> None:
    engine, _ = started
    policies, requests = [policy_of(folder, seed) for seed in (5, 6)], [request(prompt, 1, 2) for prompt in PROMPTS]
    publish(engine, policies[0], 5, is_complete=False)
    before = generate_all(engine, requests, SAMPLING)
    slept = engine.sleep(("weights", "cache"))
    assert not slept.freed.get("weights")  # copied; vLLM's CPU build keeps it where it is
    assert (slept.moved | slept.kept)["weights"] > 0
    woken = engine.wake(("weights", "cache"))
    assert woken.moved == slept.moved
    assert engine.version == 5
    assert_identical(generate_all(engine, requests, SAMPLING), before)
    publish(engine, policies[1], 6, is_complete=False)
    assert_engine_is(engine, policies[1])
    publish(engine, policy_of(folder, 0), 0, is_complete=True)


def test_merged_weights_are_refused(started: tuple[RolloutEngine, Path], folder: Path) -> None:
    engine, _ = started
    version, merged = engine.version, merged_weights(policy_of(folder, 1))
    with pytest.raises(WeightsError, match="don't fit the model"):
        engine.load_weights(tensor_specs(merged), [bucket_of(merged)], 9)
    assert engine.version == version


def test_only_the_adapters_are_sent(folder: Path) -> None:
    policy = policy_of(folder, 1)
    weights = published_weights(policy, as_adapters=True)
    changing = changing_weights(weights, policy, as_adapters=True)
    assert set(changing) == {name for name in weights if is_adapter(name)}
    merged = merged_weights(policy)
    of_blocks = changing_weights(merged, policy, as_adapters=False)
    assert 5 * sent_bytes(tensor_specs(changing), 2**20) < sent_bytes(tensor_specs(of_blocks), 2**20)


@pytest.mark.parametrize(("rank", "experts", "text"), [(513, False, "of rank 512 at most"), (4, True, "a mixture of")])
def test_adapters_that_vllm_cannot_compute_with_are_refused(
    tmp_path: Path, rank: int, experts: bool, text: str
) -> None:
    make = make_tiny_moe if experts else make_tiny_model
    make(tmp_path)
    model = ModelConfig.model_validate({"path": str(tmp_path), "lora": LORA | {"rank": rank}})
    with pytest.raises(ConfigError, match=text) as caught:
        check_adapters(model)
    assert 'model.lora.publish = "merged"' in str(caught.value)
    merged = ModelConfig.model_validate({"path": str(tmp_path), "lora": {"rank": rank}})
    check_adapters(merged)
