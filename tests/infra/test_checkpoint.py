import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.checkpoint import (
    MANIFEST,
    checkpoint_path,
    complete_versions,
    load_trainer_state,
    newest_checkpoint,
    read_manifest,
    save_checkpoint,
)
from infra.models import load_model, load_tokenizer
from schemas.config.model import ModelConfig
from schemas.errors import CheckpointError
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A model that has been trained for two steps, its tokenizer and its optimizer."""
    source = ModelConfig(path=str(make_tiny_model(tmp_path_factory.mktemp("model"))))
    model = load_model(source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=torch.arange(8)[None]).logits.square().mean().backward()
        optimizer.step()
    return {"model": model, "tokenizer": load_tokenizer(source), "optimizer": optimizer}


def save(directory: Path, parts: dict, version: int, keep_last: int = 9) -> Path:
    return save_checkpoint(directory, version=version, num_updates=version, report=None, keep_last=keep_last, **parts)


def test_weights_optimizer_and_random_state_come_back_bit_for_bit(tmp_path: Path, parts: dict) -> None:
    torch.manual_seed(5)
    path = save(tmp_path, parts, 3)
    expected = torch.rand(4)
    model = load_model(ModelConfig(path=str(path)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    load_trainer_state(path, model, optimizer)
    assert torch.equal(torch.rand(4), expected)
    for (name, old), new in zip(parts["model"].named_parameters(), model.parameters(), strict=True):
        assert torch.equal(old, new), name
        old_state, new_state = parts["optimizer"].state[old], optimizer.state[new]
        assert old_state.keys() == new_state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for slot in old_state:
            assert torch.equal(old_state[slot], new_state[slot]), (name, slot)


def test_a_checkpoint_is_an_ordinary_hugging_face_folder(tmp_path: Path, parts: dict) -> None:
    path = save(tmp_path, parts, 1)
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("3 + 4", return_tensors="pt")["input_ids"]
    assert torch.equal(model(ids).logits, parts["model"](ids).logits)


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path, parts: dict) -> None:
    suffixes = {file.suffix for file in save(tmp_path, parts, 1).iterdir()}
    assert suffixes <= {".json", ".safetensors", ".jinja"}


def test_without_its_manifest_it_is_not_a_checkpoint(tmp_path: Path, parts: dict) -> None:
    save(tmp_path, parts, 1)
    (save(tmp_path, parts, 2) / MANIFEST).unlink()
    assert complete_versions(tmp_path) == [1]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found[1].version == 1
    assert newest_checkpoint(tmp_path / "elsewhere") is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_one_is_skipped_with_a_warning_that_names_it(
    tmp_path: Path, parts: dict, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, parts, 1)
    weights = save(tmp_path, parts, 2) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
    elif damage == "truncate":
        weights.write_bytes(content[:-1])
    else:
        weights.unlink()
    with pytest.raises(CheckpointError, match=r"step-000002/model\.safetensors"):
        read_manifest(checkpoint_path(tmp_path, 2))
    with caplog.at_level(logging.WARNING):
        found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found[1].version == 1
    assert "step-000002/model.safetensors" in caplog.text


def test_only_the_last_ones_are_kept(tmp_path: Path, parts: dict) -> None:
    for version in range(1, 5):
        save(tmp_path, parts, version, keep_last=2)
    assert complete_versions(tmp_path) == [3, 4]
    assert not checkpoint_path(tmp_path, 2).exists()
