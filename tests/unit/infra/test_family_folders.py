"""Models of many families are loaded, adapted, saved, restored and exported as what they are."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FalconConfig, PreTrainedModel, ZambaConfig, ZayaConfig

from infra.checkpoints.model import write_model_folder
from infra.checkpoints.state import policy_tensors, restore_policy
from infra.checkpoints.store import CheckpointStore
from infra.models.assets import save_assets
from infra.models.load import cast_model, describe_adapter
from infra.models.lora import adapted_layers, add_adapter
from infra.models.scoring import load_scoring_module
from rl_core.scoring import pack_row
from rl_core.scoring.miniature import build_miniature
from schemas.config.model import LoraConfig, ModelConfig
from schemas.errors import ConfigError
from tests.support.configs import run_config
from tests.support.families import FAMILIES, make_family
from tests.support.policies import load_policy

IDS = torch.arange(3, 15)[None]
every_family = pytest.mark.parametrize("name", FAMILIES)


def save(store: CheckpointStore, config: ModelConfig, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    store.save(
        1,
        policy_tensors(model, optimizer),
        num_updates=1,
        report=None,
        adapter=describe_adapter(config),
        write_assets=partial(save_assets, config),
    ).wait()


def train(model: PreTrainedModel, lr: float) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=lr)
    model(input_ids=IDS, use_cache=False).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def weights_in(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@every_family
def test_an_export_of_the_starting_weights_is_what_transformers_saves(name: str, dtype: str, tmp_path: Path) -> None:
    """Tensor by tensor, dtype by dtype; and its other files are those of the model's folder."""
    base = make_family(tmp_path / "base", name, dtype=dtype)
    config, store = ModelConfig(path=str(base)), CheckpointStore(str(tmp_path / "policy"))
    model = load_policy(config)
    save(store, config, model, train(model, lr=0.0))
    write_model_folder(store, 1, tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(base, dtype="auto").save_pretrained(tmp_path / "expected")
    found, expected = weights_in(tmp_path / "out"), weights_in(tmp_path / "expected")
    assert {key: (value.dtype, value.shape) for key, value in found.items()} == {
        key: (value.dtype, value.shape) for key, value in expected.items()
    }
    assert getattr(torch, dtype) in {value.dtype for value in found.values()}
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


@every_family
def test_a_policy_is_restored_with_the_weights_that_no_loss_has_reached(name: str, tmp_path: Path) -> None:
    config = ModelConfig(path=str(make_family(tmp_path / "base", name)))
    store, model = CheckpointStore(str(tmp_path / "policy")), load_policy(config)
    optimizer = train(model, lr=0.01)
    save(store, config, model, optimizer)
    again = load_policy(config)
    optimizer_again = torch.optim.AdamW([weight for weight in again.parameters() if weight.requires_grad], lr=0.01)
    restore_policy(store, 1, again, optimizer_again)
    expected, found = policy_tensors(model, optimizer), policy_tensors(again, optimizer_again)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@every_family
def test_adapters_are_on_linear_layers_and_merge_into_them(name: str, tmp_path: Path) -> None:
    base = make_family(tmp_path / "base", name, dtype="float32")
    config = ModelConfig(path=str(base), lora=LoraConfig(rank=2))
    if name == "nemotron_h":
        with pytest.raises(ConfigError, match=r"peft can't adapt .*'out_proj'.*; name others in .*, of in_proj, k_p"):
            load_policy(config)
        config = config.replace(lora=LoraConfig(rank=2, target_modules=("in_proj", "q_proj")))
    store, model = CheckpointStore(str(tmp_path / "policy")), load_policy(config)
    layers = adapted_layers(model)
    assert layers
    assert not any("expert" in layer.split(".") or "vision" in layer for layer in layers)
    for lr in (0.05, 0.05):
        optimizer = train(model, lr)
    save(store, config, model, optimizer)
    write_model_folder(store, 1, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        found, expected = (each(input_ids=IDS, use_cache=False).logits for each in (exported, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    changed = {
        key for key, value in weights_in(tmp_path / "out").items() if not torch.equal(value, weights_in(base)[key])
    }
    assert changed


def test_layers_that_share_a_weight_are_not_adapted(tmp_path: Path) -> None:
    """Merged, the adapters of both would be added to the one weight."""
    build_miniature(ZambaConfig(), 10**9).save_pretrained(tmp_path / "zamba")
    config = ModelConfig(path=str(tmp_path / "zamba"), lora=LoraConfig(rank=2))
    with pytest.raises(ConfigError, match=r"share the weights of .*; name others in .*, of in_proj, linear, out_proj"):
        load_policy(config)
    chosen = LoraConfig(rank=2, target_modules=("in_proj", "linear", "out_proj"))
    assert adapted_layers(load_policy(config.replace(lora=chosen)))


def test_a_class_of_its_own_that_computes_a_linear_layer_is_adapted() -> None:
    model = build_miniature(FalconConfig(), 10**9)
    add_adapter(model, LoraConfig(rank=2))
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} >= {"query_key_value", "dense", "dense_4h_to_h"}


def test_what_a_models_code_makes_in_float32_is_exported_in_float32() -> None:
    model = build_miniature(ZayaConfig(), 10**9)
    cast_model(model, torch.bfloat16)
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    biases = {name for name in dtypes if name.endswith("balancing_biases")}
    assert {dtypes[name] for name in biases} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in biases} == {torch.bfloat16}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", ["afmoe", "deepseek_v3", "ernie4_5_moe", "glm4_moe"])
def test_policy_and_reference_choose_the_same_experts_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Routers add biases that differ by less than bfloat16 can tell apart."""
    base = make_family(tmp_path / "model", name)
    file = base / "model.safetensors"
    weights = load_file(file)
    [bias] = {key.rpartition(".")[2] for key in weights if "bias" in key}
    for key in (key for key in weights if key.endswith(bias)):
        weights[key] = 7 + 0.01 * torch.randn(weights[key].shape, generator=torch.Generator().manual_seed(1))
    save_file(weights, file, metadata={"format": "pt"})
    config = run_config(tmp_path, model={"compute_dtype": "bfloat16"}, packing={"kind": "padded"})
    row = pack_row(IDS[0, :2], torch.tensor([2]), IDS[0, 2:], torch.tensor([10]))
    scores = []
    for trains in (True, False):
        module, _ = load_scoring_module(config, config.model, torch.device("cpu"), trains=trains)
        held = [value for key, value in module.named_buffers() if key.endswith(bias)]
        assert all(map(torch.equal, held, (value for key, value in weights.items() if key.endswith(bias))))
        assert held
        with torch.no_grad():
            scores.append(module(row).logprobs)
    assert torch.equal(*scores)


def test_a_generation_config_that_transformers_will_not_write_is_copied(tmp_path: Path) -> None:
    base = make_family(tmp_path / "base", "llama")
    content = json.dumps({"temperature": 0.6, "top_p": 0.95})
    (base / "generation_config.json").write_text(content)
    config, store = ModelConfig(path=str(base)), CheckpointStore(str(tmp_path / "policy"))
    model = load_policy(config)
    save(store, config, model, train(model, lr=0.01))
    write_model_folder(store, 1, tmp_path / "out")
    assert (tmp_path / "out/generation_config.json").read_text() == content
