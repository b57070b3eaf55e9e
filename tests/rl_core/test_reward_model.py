"""Reward models: tiny ones with random weights, in this process and in a reward process."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from infra.models.tiny import END, make_tokenizer
from infra.rewards.open import open_reward_scorer
from rl_core.rewards import load_reward
from rl_core.rollout.chat import ChatTemplate
from schemas.config.reward import ModelReward
from schemas.errors import ConfigError, ModelError
from tests.rl_core.reward_items import item


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("reward"), make_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def plain_score(folder: Path, prompt: str, completion: str) -> float:
    model = Qwen3ForSequenceClassification.from_pretrained(folder).eval()
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    ids = ChatTemplate(make_tokenizer()).encode(messages, with_prompt=False)
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


def test_a_process_scores_each_response_as_if_it_were_alone(folder: Path) -> None:
    items = [item("4"), item("four, or so"), item(f"4{END}"), item("4" * 100)]
    config = ModelReward(path=str(folder), max_tokens=100)
    scorer = open_reward_scorer(config)
    try:
        scorer.wait_until_ready()
        outcomes = scorer.score(items)
    finally:
        scorer.close()
    for each, outcome in zip(items[:3], outcomes, strict=False):
        assert outcome.reward == pytest.approx(plain_score(folder, each.prompt, str(each.completion)), abs=1e-6)
    assert len({outcome.reward for outcome in outcomes}) == 4  # a control token's name in a text is text
    assert "more than reward.max_tokens = 100" in (outcomes[3].failure or "")


def changed(folder: Path, to: Path, **fields: object) -> str:
    """Copy a model with other fields of its config; return the copy."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(config))
    return str(to)


def test_what_is_no_reward_model_is_refused(folder: Path, tmp_path: Path) -> None:
    labels = {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    for path, text in (
        (str(tmp_path / "absent"), "can't be loaded"),
        (changed(folder, tmp_path / "causal", architectures=["Qwen3ForCausalLM"]), "is Qwen3ForCausalLM, expected"),
        (changed(folder, tmp_path / "two", **labels), "has 2 labels, expected 1"),
    ):
        with pytest.raises(ModelError, match=text):
            load_reward(ModelReward(path=path))
    deeper = changed(folder, tmp_path / "deeper", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    scorer = open_reward_scorer(ModelReward(path=deeper))
    with pytest.raises(ModelError, match=r"layers\.2\..* are missing, and would be random"):
        scorer.wait_until_ready()
    scorer.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(folder: Path) -> None:
    scorer = open_reward_scorer(ModelReward(path=str(folder), device="cuda"))
    with pytest.raises(ConfigError, match="sees no GPU"):
        scorer.wait_until_ready()
    scorer.close()


def test_without_processes_it_is_the_same(folder: Path) -> None:
    function = load_reward(config := ModelReward(path=str(folder), num_processes=0, timeout_seconds=None))
    scorer = open_reward_scorer(config)
    scorer.wait_until_ready()
    assert scorer.score([item("4")])[0].reward == pytest.approx(plain_score(folder, item("4").prompt, "4"), abs=1e-6)
    assert function is not None
    scorer.close()
