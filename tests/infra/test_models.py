import json
import shutil
from pathlib import Path

import pytest
import torch

from infra.models import load_model, load_tokenizer, stop_token_ids
from schemas.config.model import ModelConfig
from schemas.errors import ModelError
from tests.tiny import END, make_tiny_model


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
    assert stop_token_ids(model, tokenizer) == (tokenizer.convert_tokens_to_ids(END),)


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(tiny: Path) -> None:
    tokenizer, model = load_tokenizer(config_of(tiny)), load_model(config_of(tiny))
    model.generation_config.eos_token_id = [3, tokenizer.eos_token_id]
    assert stop_token_ids(model, tokenizer) == (3, tokenizer.eos_token_id)


def test_dropout_is_gone_in_train_mode_too(folder: Path) -> None:
    edit_json(folder / "config.json", attention_dropout=0.5)
    model = load_model(config_of(folder)).train()
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_a_missing_folder_is_named() -> None:
    for load in (load_tokenizer, load_model):
        with pytest.raises(ModelError, match="/no/such/folder: there is no such folder"):
            load(ModelConfig(path="/no/such/folder"))


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a file"):
        load_model(config_of(folder / "config.json"))


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"there is no config\.json"):
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


def test_missing_weights_are_refused_and_not_made_up(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ModelError, match=r"weights are not in the folder.*layers\.2"):
        load_model(config_of(folder))


def test_unreadable_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="the model can't be loaded") as caught:
        load_model(config_of(folder))
    assert "\n" not in str(caught.value)
