"""LoRA adapters: what trains, what is computed with and without them, and merging."""

import copy
import sys
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from infra.checkpoints.state import policy_tensors, restore_policy
from infra.checkpoints.store import CheckpointStore
from infra.models.lora import (
    adapter_deltas,
    adapter_disabled,
    add_adapter,
    has_adapter,
    is_adapter,
    merged_weights,
    save_adapters,
    trainable_names,
)
from rl_core.scoring import leak_probe, pack_row, packed_scores, use_packed_attention
from schemas.config.model import LoraConfig
from schemas.errors import ConfigError
from tests.support.packed import random_batch, tiny_qwen3

CONFIG = LoraConfig(rank=3, alpha=6)
MERGED_TOLERANCE = 1e-5  # nats: (W + s B A) x and W x + s B (A x) round differently


def logprobs(model: PreTrainedModel) -> Tensor:
    batch = random_batch([3, 1, 5], [4, 7, 2])
    use_packed_attention(model)
    row = pack_row(batch.prompt_ids, batch.prompt_lengths, batch.response_ids, batch.response_lengths)
    return packed_scores(model, row, temperature=0.7, chunk_tokens=4).logprobs


def train(model: PreTrainedModel, num_steps: int = 3) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(num_steps):
        logprobs(model).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.fixture(params=[{}, {"tie_word_embeddings": True, "attention_bias": True}], ids=["plain", "tied-biased"])
def base(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_qwen3(**request.param)


@pytest.fixture
def adapted(base: PreTrainedModel) -> PreTrainedModel:
    """The base with a trained adapter."""
    model = copy.deepcopy(base)
    add_adapter(model, CONFIG)
    train(model)
    return model


def test_a_new_adapter_changes_nothing_and_only_it_trains(base: PreTrainedModel) -> None:
    model, count = copy.deepcopy(base), sum(p.numel() for p in base.parameters())
    add_adapter(model, CONFIG)
    assert type(model) is type(base)
    assert has_adapter(model)
    leak_probe_on(model)
    assert torch.equal(logprobs(model), logprobs(base))
    # Seven linear layers in each of two decoder layers: A is [3, in], B is [out, 3].
    names = trainable_names(model)
    assert len(names) == 2 * 7 * 2
    assert all(".lora_A.default.weight" in name or ".lora_B.default.weight" in name for name in names)
    sizes = {"q": 32 + 32, "k": 32 + 16, "v": 32 + 16, "o": 32 + 32, "gate": 32 + 48, "up": 32 + 48, "down": 48 + 32}
    assert sum(p.numel() for p in model.parameters()) == count + 2 * 3 * sum(sizes.values())
    logprobs(model).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == names


def leak_probe_on(model: PreTrainedModel) -> None:
    use_packed_attention(model)
    leak_probe(model)


def test_initial_weights_are_a_function_of_the_seed(base: PreTrainedModel) -> None:
    def initial_weights(seed: int) -> Tensor:
        model = copy.deepcopy(base)
        torch.rand(1)  # the global state must not matter
        add_adapter(model, CONFIG, seed)
        return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])

    assert torch.equal(initial_weights(1), initial_weights(1))
    assert not torch.equal(initial_weights(1), initial_weights(2))
    before = torch.get_rng_state()
    add_adapter(copy.deepcopy(base), CONFIG)
    assert torch.equal(torch.get_rng_state(), before)


def test_with_the_adapter_disabled_it_is_the_base_bit_for_bit(base: PreTrainedModel, adapted: PreTrainedModel) -> None:
    trained, names = logprobs(adapted), trainable_names(adapted)
    assert (trained - logprobs(base)).abs().max() > 0.1
    with adapter_disabled(adapted):
        assert torch.equal(logprobs(adapted), logprobs(base))
    assert torch.equal(logprobs(adapted), trained)
    assert trainable_names(adapted) == names


def test_merged_weights_equal_those_of_peft(base: PreTrainedModel, adapted: PreTrainedModel) -> None:
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    merged = merged_weights(adapted)
    assert merged.keys() == dict(base.named_parameters()).keys()
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    reference = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=3, lora_alpha=6, target_modules=layers))
    weights = {f"base_model.model.{name}": p for name, p in adapted.named_parameters() if p.requires_grad}
    assert not reference.load_state_dict(weights, strict=False).unexpected_keys
    expected = dict(reference.merge_and_unload().named_parameters())
    for name, tensor in merged.items():
        assert torch.equal(tensor, expected[name]), name
    for name, tensor in adapted.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_merged_model_computes_what_the_adapted_one_does(base: PreTrainedModel, adapted: PreTrainedModel) -> None:
    base.load_state_dict(merged_weights(adapted), strict=False)
    assert not has_adapter(base)
    torch.testing.assert_close(logprobs(base), logprobs(adapted), rtol=0, atol=MERGED_TOLERANCE)


def test_what_an_adapter_adds_is_what_merging_adds(base: PreTrainedModel, adapted: PreTrainedModel) -> None:
    weights, deltas = dict(base.named_parameters()), adapter_deltas(adapted)
    merged = merged_weights(adapted)
    assert set(deltas) == {name for name, weight in weights.items() if not torch.equal(merged[name], weight)}
    for name, delta in deltas.items():
        assert torch.equal(weights[name] + delta(), merged[name]), name


def test_peft_reads_what_is_saved(base: PreTrainedModel, adapted: PreTrainedModel, tmp_path: Path) -> None:
    weights = {name: weight.detach() for name, weight in adapted.named_parameters() if is_adapter(name)}
    save_adapters(weights, CONFIG, tmp_path)
    read = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).get_base_model()
    assert torch.equal(logprobs(read), logprobs(adapted))


def test_a_model_without_adapter_is_unchanged(base: PreTrainedModel) -> None:
    expected = logprobs(base)
    with adapter_disabled(base):
        assert torch.equal(logprobs(base), expected)
    parameters = dict(base.named_parameters())
    weights = merged_weights(base)
    assert weights.keys() == parameters.keys()
    assert all(weights[name].data_ptr() == parameters[name].data_ptr() for name in weights)
    assert adapter_deltas(base) == {}
    assert trainable_names(base) == list(parameters)


def test_only_the_named_layers_are_adapted(base: PreTrainedModel) -> None:
    add_adapter(base, CONFIG.replace(target_modules=("v_proj", "layers.1.mlp.up_proj")))
    layers = {name.partition(".lora_")[0] for name in trainable_names(base)}
    assert layers == {
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.self_attn.v_proj",
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("c_attn", "'c_attn' is not a linear layer of Qwen3ForCausalLM"),
        ("norm", "'norm' is not a linear layer of"),
        ("lm_head", "'lm_head' is the LM head of"),
        ("_proj", "'_proj' is not a"),
    ],
)
def test_other_layers_are_rejected_with_the_possible_ones(base: PreTrainedModel, target: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        add_adapter(base, CONFIG.replace(target_modules=("q_proj", target)))
    assert reason in str(caught.value)
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in str(caught.value)
    assert not has_adapter(base)


def test_without_peft_the_extra_is_named(base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'sluice-rl\[lora\]'"):
        add_adapter(base, CONFIG)


def test_a_checkpoint_holds_only_the_adapter(base: PreTrainedModel, tmp_path: Path) -> None:
    model, again = copy.deepcopy(base), copy.deepcopy(base)
    add_adapter(model, CONFIG, seed=1)
    optimizer = train(model)
    store = CheckpointStore(str(tmp_path))
    store.save(1, policy_tensors(model, optimizer), num_updates=3, report=None).wait()
    assert {name for name in store.tensor_names(1) if name.startswith("model/")} == {
        f"model/{name}" for name in trainable_names(model)
    }
    add_adapter(again, CONFIG, seed=2)
    restored = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=0.05)
    restore_policy(store, 1, again, restored)
    assert torch.equal(logprobs(again), logprobs(model))
    first, second = policy_tensors(model, optimizer), policy_tensors(again, restored)
    assert all(torch.equal(first[name], second[name]) for name in first if name.startswith("optimizer/"))
