"""Models and tokenizers from Hugging Face folders, and what is said about unusable ones."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FalconConfig, FalconForCausalLM, Qwen3_5Config

from infra.models.assets import keep_dropout, save_assets
from infra.models.load import (
    build_meta_model,
    check_weight_files,
    describe_adapter,
    empty_policy,
    load_model,
    load_tokenizer,
    stop_token_ids,
)
from infra.models.lora import trainable_names
from infra.models.weights import load_weights
from rl_core.scoring import pack_row, packed_scores, use_packed_attention
from schemas.config.model import LoraConfig, ModelConfig
from schemas.errors import ModelError
from tests.support.policies import load_policy
from tests.support.tiny import END, make_tiny_model, make_tiny_moe
from tests.support.two_ranks import load_by_ranks

LoadOrCheck = Callable[[ModelConfig], object]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig(path=str(folder))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_loads_in_float32_and_eval_mode(tiny: Path) -> None:
    tokenizer, model = load_tokenizer(config_of(tiny)), load_model(config_of(tiny))
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.decode(tokenizer("größe 4 ≠ 5")["input_ids"]) == "größe 4 ≠ 5"
    assert stop_token_ids(config_of(tiny), tokenizer) == (tokenizer.convert_tokens_to_ids(END),)


def test_stop_tokens_come_from_tokenizer_and_generation_config(folder: Path) -> None:
    tokenizer = load_tokenizer(config_of(folder))
    edit_json(folder / "generation_config.json", eos_token_id=[3, tokenizer.eos_token_id])
    assert stop_token_ids(config_of(folder), tokenizer) == (3, tokenizer.eos_token_id)
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=5)
    assert stop_token_ids(config_of(folder), tokenizer) == (5, tokenizer.eos_token_id)


@pytest.mark.parametrize("eos", ["<|end|>", 99999, -1, True, [3, 260], [[3]]])
def test_stop_tokens_that_are_none_of_the_model(folder: Path, eos: object) -> None:
    tokenizer = load_tokenizer(config_of(folder))
    edit_json(folder / "generation_config.json", eos_token_id=eos)
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id has .*, expected token ids.* 0 to 259"):
        stop_token_ids(config_of(folder), tokenizer)


@pytest.mark.parametrize("content", ["{", "[]", '"a"'])
def test_a_generation_config_that_can_not_be_read(folder: Path, content: str) -> None:
    tokenizer = load_tokenizer(config_of(folder))
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config.json can't be read: ") as caught:
        stop_token_ids(config_of(folder), tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token_id": "x"},
        {"hidden_size": "16"},
        {"num_hidden_layers": 2.5},
        {"vocab_size": None},
        {"rope_scaling": "x"},
        {"layer_types": ["a"]},
        {"model_type": "nope"},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("load_from", [load_tokenizer, load_model, build_meta_model])
def test_a_config_that_can_not_be_read(
    folder: Path, changes: dict[str, object], load_from: Callable[[ModelConfig], object]
) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ModelError, match=r"^model.path .*: config.json can't be read: ") as caught:
        load_from(config_of(folder))
    assert "\n" not in str(caught.value)


def test_dropout_is_removed_in_train_mode_too(folder: Path) -> None:
    edit_json(folder / "config.json", attention_dropout=0.5)
    model = load_model(config_of(folder)).train()
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_dropout_that_layers_read_from_the_config_is_removed(tiny: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = FalconConfig(**sizes, hidden_dropout=0.5, attention_dropout=0.5)
    FalconForCausalLM(config).save_pretrained(tmp_path)
    model = empty_policy(config_of(tmp_path).replace(gradient_checkpointing=True))
    load_weights(model, str(tmp_path), torch.device("cpu"))
    tokens = torch.arange(8)[None]
    expected = FalconForCausalLM.from_pretrained(tmp_path).eval()(tokens).logits
    torch.testing.assert_close(model(tokens).logits, expected)
    torch.testing.assert_close(model.train()(tokens).logits, expected)


def test_a_saved_config_keeps_the_dropout_that_training_removes(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "config.json", attention_dropout=0.25)
    load_model(config_of(folder)).save_pretrained(saved := tmp_path / "saved")
    assert json.loads((saved / "config.json").read_text())["attention_dropout"] == 0
    keep_dropout(saved, str(folder))
    kept, own = (AutoConfig.from_pretrained(path).to_diff_dict() for path in (saved, folder))
    assert kept | {"_name_or_path": ""} == own | {"_name_or_path": ""}
    whole = Qwen3_5Config(text_config={"attention_dropout": 0.25, "num_hidden_layers": 2})
    whole.save_pretrained(tmp_path / "whole")
    whole.text_config.attention_dropout = 0.0
    whole.text_config.save_pretrained(tmp_path / "part")
    keep_dropout(tmp_path / "part", str(tmp_path / "whole"))
    assert json.loads((tmp_path / "part" / "config.json").read_text())["attention_dropout"] == 0.25


def packed_gradients(config: ModelConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the log-probs of two packed sequences, and the gradients of their sum."""
    model = load_policy(config, seed=3)
    use_packed_attention(model)
    row = pack_row(torch.arange(40, 45), torch.tensor([2, 3]), torch.arange(50, 57), torch.tensor([4, 3]))
    logprobs = packed_scores(model, row, temperature=1.0, chunk_tokens=4).logprobs
    logprobs.sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["whole", "adapter"])
def test_gradient_checkpointing_gives_the_same_numbers(tiny: Path, lora: LoraConfig | None) -> None:
    config = config_of(tiny).replace(lora=lora)
    logprobs, expected = packed_gradients(config)
    checkpointed = config.replace(gradient_checkpointing=True)
    policy = load_policy(checkpointed)
    assert policy.is_gradient_checkpointing
    assert {type(module).__name__ for module in policy.modules() if module.training} == {"Qwen3DecoderLayer"}
    again, gradients = packed_gradients(checkpointed)
    assert torch.equal(again, logprobs)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_a_policy_has_the_adapter_of_its_config(tiny: Path) -> None:
    config = config_of(tiny)
    assert trainable_names(load_policy(config)) == [name for name, _ in load_model(config).named_parameters()]
    adapted = config.replace(lora=LoraConfig(rank=2, target_modules=("q_proj",)))
    assert {name.partition(".lora_")[0] for name in trainable_names(load_policy(adapted))} == {
        f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)
    }
    assert describe_adapter(config) is None
    adapter = describe_adapter(adapted)
    assert adapter is not None
    assert (adapter.base_model, adapter.lora) == (str(tiny.resolve()), adapted.lora)


def test_assets_are_the_models_own_files_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    """Whatever this transformers would write otherwise, or not at all."""
    own = {
        "config.json": (folder / "config.json").read_text().replace("{", '{"rope_theta": 1e6, ', 1),
        "generation_config.json": '{"temperature": 0.6, "eos_token_id": [3, 258]}',
        "preprocessor_config.json": '{"size":   28}',
        "tokenizer.model": "pieces",
        "tokenizer.model.v3": "more pieces",
        "source.spm": "pieces",
        "vocab.bpe": "merges",
        "modeling_own.py": "raise SystemExit",
        "additional_chat_templates/rag.jinja": "{{ documents }}",
    }
    (folder / "additional_chat_templates").mkdir()
    for name, content in own.items():
        (folder / name).write_text(content)
    for name in ("model.safetensors.index.json", "notes.pdf", "a name.json", ".hidden.json", "old/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    save_assets(config_of(folder), tmp_path / "assets")
    kept = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", *own}
    found = {file.relative_to(tmp_path / "assets").as_posix() for file in (tmp_path / "assets").rglob("*.*")}
    assert found == kept
    assert all((tmp_path / "assets" / name).read_bytes() == (folder / name).read_bytes() for name in kept)


def test_a_missing_folder_is_named() -> None:
    for load in (load_tokenizer, load_model):
        with pytest.raises(ModelError, match="/no/such/folder: no such folder"):
            load(ModelConfig(path="/no/such/folder"))


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a file"):
        load_model(config_of(folder / "config.json"))


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model(config_of(folder))


def test_a_folder_without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"none of tokenizer\.json.*save_pretrained"):
        load_tokenizer(config_of(folder))


def test_a_broken_tokenizer_file(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer can't be loaded"):
        load_tokenizer(config_of(folder))


def test_a_tokenizer_without_chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        load_tokenizer(config_of(folder))


def test_a_tokenizer_without_end_token(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="no eos_token"):
        load_tokenizer(config_of(folder))


def test_a_tokenizer_larger_than_the_embedding(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, vocab_size=258)
    with pytest.raises(ModelError, match=r"largest token id is 259.*embeddings for 258 tokens"):
        load_tokenizer(config_of(folder))


@pytest.mark.parametrize("load", [load_model, check_weight_files])
def test_missing_weights_are_rejected_and_not_random(folder: Path, load: LoadOrCheck) -> None:
    edit_json(folder / "config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ModelError, match=r"weights are not in the folder.*layers\.2"):
        load(config_of(folder))


def change_weights(folder: Path, **changes: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}, file)


@pytest.mark.parametrize("load", [load_model, check_weight_files])
def test_weights_that_are_tied_and_differ_are_refused_and_the_advice_works(folder: Path, load: LoadOrCheck) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(folder, lm_head__weight=embedding.clone())
    assert torch.equal(load_model(config_of(folder)).lm_head.weight, embedding)  # the same twice
    load(config_of(folder))
    change_weights(folder, lm_head__weight=embedding.flip(0))
    with pytest.raises(
        ModelError,
        match=r"model\.embed_tokens\.weight in .* differs from lm_head\.weight in .*set tie_word_embeddings to false",
    ):
        load(config_of(folder))
    edit_json(folder / "config.json", tie_word_embeddings=False)
    model = load_model(config_of(folder))
    assert torch.equal(model.lm_head.weight, embedding.flip(0))
    assert torch.equal(model.get_input_embeddings().weight, embedding)


def test_weights_that_are_no_part_of_the_model_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_weight_files(config_of(folder))
    assert not caplog.records
    change_weights(folder, visual__patch__weight=torch.ones(2), model__rotary_emb__inv_freq=torch.ones(2))
    check_weight_files(config_of(folder))
    assert "1 of its tensors are no part of Qwen3ForCausalLM" in caplog.text
    assert "visual.patch.weight" in caplog.text


@pytest.mark.parametrize("load", [load_model, check_weight_files])
def test_unreadable_weights(folder: Path, load: LoadOrCheck) -> None:
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors can't be read") as caught:
        load(config_of(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("load", [load_model, check_weight_files])
def test_weights_of_another_shape_are_named_with_their_file(folder: Path, load: LoadOrCheck) -> None:
    edit_json(folder / "config.json", intermediate_size=24)
    with pytest.raises(
        ModelError, match=r"layers\.0\.mlp\..* in model\.safetensors has shape .*, but model\.layers\.0"
    ):
        load(config_of(folder))


@pytest.mark.parametrize("load", [load_model, check_weight_files])
def test_a_missing_file_of_an_index_is_named(folder: Path, load: LoadOrCheck) -> None:
    load_model(config_of(folder)).save_pretrained(folder / "parts", max_shard_size="20KB")
    parts = sorted((folder / "parts").glob("*.safetensors"))
    assert len(parts) > 2
    parts[1].unlink()
    with pytest.raises(ModelError, match=f"names {parts[1].name}, which is missing"):
        load(config_of(folder / "parts"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"weight_map": {"w": "../other/model.safetensors"}}', "'../other/model.safetensors', which is not a file of"),
        ('{"weight_map": {"w": "/etc/passwd"}}', "'/etc/passwd', which is not a file of the same folder"),
        ('{"weight_map": ["w"]}', "is not an index of safetensors files: ValidationError"),
        ("{", "is not an index of safetensors files: ValidationError"),
    ],
)
def test_an_index_names_files_of_its_own_folder(folder: Path, content: str, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=re.escape(message)):
        load_policy(config_of(folder))


@pytest.fixture
def snapshot(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the files that a cache without network has of the model `tiny/model` of the hub: all of a folder's."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    place = tmp_path / "cache" / "models--tiny--model"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    return Path(shutil.copytree(folder, place / "snapshots" / ("0" * 40)))


@pytest.mark.parametrize("load", [load_model, check_weight_files])
def test_weights_that_are_not_in_the_cache_are_told_to_be_downloaded(snapshot: Path, load: LoadOrCheck) -> None:
    config = ModelConfig(path="tiny/model")
    load(config)  # it has one file: that it has no index, nobody can say
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"not all in the cache, and the hub can't be reached .* hf download tiny"):
        load(config)


def test_a_driver_that_loads_no_weights_needs_none(snapshot: Path, caplog: pytest.LogCaptureFixture) -> None:
    (snapshot / "model.safetensors").unlink()
    check_weight_files(ModelConfig(path="tiny/model"), is_here=False)
    assert "hf download tiny/model; the nodes that load them may have them" in caplog.text


def test_a_shard_that_is_not_in_the_cache_is_told_to_be_downloaded(snapshot: Path) -> None:
    index = {"weight_map": dict.fromkeys(load_file(snapshot / "model.safetensors"), "model-1.safetensors")}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="hf download tiny/model"):
        load_model(ModelConfig(path="tiny/model"))


def test_a_generation_config_that_can_not_be_asked_for_is_told(
    snapshot: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ModelConfig(path="tiny/model")
    tokenizer = load_tokenizer(config)
    stop_token_ids(config, tokenizer)
    assert not caplog.records
    (snapshot / "generation_config.json").unlink()
    stop_token_ids(config, tokenizer)
    assert "generation_config.json is not in the cache" in caplog.text
    caplog.clear()
    absent = snapshot.parents[1] / ".no_exist" / snapshot.name / "generation_config.json"
    absent.parent.mkdir(parents=True)
    absent.touch()  # the hub has said so before
    stop_token_ids(config, tokenizer)
    assert not caplog.records


def test_a_rank_reads_the_experts_that_it_holds_and_no_others(tmp_path: Path) -> None:
    base = make_tiny_moe(tmp_path / "model", num_experts=3)
    for rank, read in enumerate(load_by_ranks(config_of(base), tmp_path)):
        experts = [re.search(r"experts\.(\d)\.", name) for name in read]
        numbers = {int(found[1]) for found in experts if found}
        assert numbers == ({0, 1}, {2})[rank]
        assert len(read) == len(experts) == len(numbers) * 2 * 3  # of two layers, with three matrices each


@pytest.mark.parametrize("load", [load_model, check_weight_files])
def test_pickled_weights_are_never_read(folder: Path, load: LoadOrCheck) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only in pytorch_model\.bin, a pickle, .*use_safetensors=False"):
        load(config_of(folder))


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3_moe", EXPERTS), ("qwen2", {"tie_word_embeddings": True}), ("gemma3_text", {}), ("gpt_neox", {})],
)
def test_every_weight_and_buffer_is_that_of_transformers(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    """Experts are stored one by one and composed; bfloat16 in several files becomes float32."""
    config = AutoConfig.for_model(family, **SIZES, **changes, eos_token_id=1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    check_weight_files(config_of(tmp_path))
    model = load_model(config_of(tmp_path))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]
    own, theirs = ({**m.state_dict(), **dict(m.named_buffers())} for m in (model, expected))
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
