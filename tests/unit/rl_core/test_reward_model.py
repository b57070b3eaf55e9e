"""Reward models: tiny ones with random weights, in this process."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPTJConfig,
    GPTJForSequenceClassification,
    Qwen3ForSequenceClassification,
)

from infra.models.tiny import END, make_tokenizer
from infra.rewards.open import open_reward_scorer
from infra.workers.reward import open_model_here
from rl_core.rewards import RewardOutcome, load_reward
from rl_core.rollout.chat import ChatTemplate
from rl_core.scoring.pooled import pack_whole, packed_pooled_scores, prepare_pooled
from schemas.config.reward import ModelReward, WeightedReward
from schemas.errors import ModelError
from tests.support.tiny import make_tiny_reward_model
from tests.unit.rl_core.reward_items import item

COMPLETIONS = ("4", "four, or so", f"4{END}", "4" * 50, "", "5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_reward_model(tmp_path_factory.mktemp("reward"))


def config_of(folder: Path | str, **fields: object) -> ModelReward:
    return ModelReward.model_validate({"path": str(folder), "max_tokens": 100} | fields)


def scores(
    config: ModelReward | WeightedReward, *completions: str, groups: tuple[int, ...] = ()
) -> list[RewardOutcome]:
    scorer = open_reward_scorer(config, open_model_here)
    try:
        scorer.wait_until_ready()
        return scorer.score([item(completion) for completion in completions], groups or (0,) * len(completions))
    finally:
        scorer.close()


def plain_score(folder: Path, completion: str) -> float:
    """Return the score that transformers computes of one response alone."""
    model = Qwen3ForSequenceClassification.from_pretrained(folder).eval()
    messages = [{"role": "user", "content": item().prompt}, {"role": "assistant", "content": completion}]
    ids = ChatTemplate(make_tokenizer()).encode(messages, with_prompt=False)
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


@pytest.mark.parametrize("token_budget", [100, 150, 16384])
def test_packed_responses_have_the_scores_of_each_alone(folder: Path, token_budget: int) -> None:
    found = [outcome.reward for outcome in scores(config_of(folder, token_budget=token_budget), *COMPLETIONS)]
    assert found == pytest.approx([plain_score(folder, each) for each in COMPLETIONS], abs=1e-5)
    assert len(set(found)) == len(COMPLETIONS)  # a control token's name in a text is text


def test_a_prompts_scores_depend_on_no_other_prompt(folder: Path) -> None:
    alone = scores(config_of(folder), *COMPLETIONS)
    both = scores(config_of(folder), *COMPLETIONS, *COMPLETIONS[:2], groups=(0,) * len(COMPLETIONS) + (1, 1))
    assert both[: len(COMPLETIONS)] == alone  # bit for bit


def test_each_prompt_of_a_group_has_the_scores_of_its_own_responses(folder: Path) -> None:
    """As environments may have added something of its own to each sample's prompt."""
    scorer = open_reward_scorer(config_of(folder), open_model_here)
    items = [replace(item("4"), prompt=prompt) for prompt in ("2 + 2 =", "3 + 3 =", "2 + 2 =")]
    try:
        scorer.wait_until_ready()
        found = scorer.score(items, (0, 0, 0))
        alone = [outcome for each in items for outcome in scorer.score([each], (0,))]
    finally:
        scorer.close()
    assert [each.reward for each in found] == pytest.approx([each.reward for each in alone], abs=1e-5)
    assert abs(found[0].reward - found[1].reward) > 1e-3


def test_a_text_that_is_too_long_fails_alone(folder: Path) -> None:
    first, late, last = scores(config_of(folder), "4", "4" * 100, "5")
    assert "more than reward.max_tokens = 100" in (late.failure or "")
    assert [first, last] == scores(config_of(folder), "4", "5")


def test_a_reward_model_in_a_weighted_sum(folder: Path) -> None:
    parts = {
        "model": {"weight": 0.5, "reward": config_of(folder).model_dump()},
        "exact": {"weight": 2, "reward": {"kind": "exact"}},
        "form": {"weight": 0, "reward": {"kind": "format", "pattern": "[0-9]+"}},
    }
    found = scores(WeightedReward.model_validate({"parts": parts, "num_processes": 1}), "4", "5", "4" * 100)
    of_model = [outcome.reward for outcome in scores(config_of(folder), "4", "5")]
    for outcome, score, exact in zip(found, of_model, (1, 0), strict=False):
        assert outcome.parts == {"model": score, "exact": exact, "form": 1}
        assert outcome.reward == pytest.approx(0.5 * score + 2 * exact)
    assert (found[2].failure or "").startswith(
        "RuntimeError: part 'model' failed: ValueError: prompt and response have"
    )
    twice = {"a_b": parts["model"], "a": {"reward": {"kind": "format", "parts": {"b": "4"}}}}
    (outcome,) = scores(WeightedReward.model_validate({"parts": twice, "num_processes": 1}), "4")
    assert outcome.failure == "RuntimeError: two parts are named 'a_b': rename one of them"
    only = WeightedReward.model_validate({"parts": {"model": parts["model"]}})
    assert [outcome.reward for outcome in scores(only, "4")] == [0.5 * of_model[0]]
    scorer = open_reward_scorer(only, open_model_here)
    scorer.wait_until_ready()
    with scorer.open_batch((0, 0)) as batch:
        batch.leave_out(1)
        batch.add(0, item("4"))
        assert batch.finish().keys() == {0}
    scorer.close()


def changed(folder: Path, to: Path, **fields: object) -> str:
    """Copy a model with other fields of its config; return the copy."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(config))
    return str(to)


def without(folder: Path, to: Path, name: str) -> str:
    changed(folder, to)
    (to / name).unlink()
    return str(to)


def with_template(folder: Path, to: Path, template: str) -> str:
    changed(folder, to)
    (to / "chat_template.jinja").write_text(template)
    return str(to)


def test_what_is_no_reward_model_is_refused_before_a_run(folder: Path, tmp_path: Path) -> None:
    labels = {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    ids, bert = ("pad_token_id", "eos_token_id"), tmp_path / "bert"
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertForSequenceClassification(BertConfig(vocab_size=300, num_labels=1, **sizes)).save_pretrained(bert)
    one_sided = "{% for message in messages if message['role'] == 'user' %}{{ message['content'] }}{% endfor %}"
    GPTJForSequenceClassification(
        GPTJConfig(vocab_size=300, num_labels=1, n_embd=8, n_layer=1, n_head=1, rotary_dim=4)
    ).save_pretrained(gptj := tmp_path / "gptj")
    for path, text in (
        (str(tmp_path / "absent"), "no such folder"),
        (with_template(folder, tmp_path / "one-sided", one_sided), "leaves out the text of the assistant's message"),
        (with_template(folder, tmp_path / "silent", "Hello"), "leaves out the text of the user's message"),
        (with_template(folder, tmp_path / "broken", "{{ messages"), "chat template .* fails on a chat"),
        ("nobody/no-such-model", "no such folder"),
        (without(folder, tmp_path / "untokenized", "tokenizer.json"), "found none of tokenizer.json"),
        (changed(folder, tmp_path / "causal", architectures=["Qwen3ForCausalLM"]), "is Qwen3ForCausalLM, expected"),
        (changed(folder, tmp_path / "two", **labels), "has 2 labels, expected 1"),
        (
            changed(folder, tmp_path / "small", vocab_size=100, **dict.fromkeys(ids)),
            "largest token id is 259, but the model has embeddings",
        ),
        (
            changed(folder, tmp_path / "short", max_position_embeddings=50),
            "has 50 positions, fewer than reward.max_tok",
        ),
        (
            changed(folder, tmp_path / "odd", hidden_size="16"),
            "config.json can't be read: .*'hidden_size' expected int",
        ),
        (without(folder, tmp_path / "plain", "chat_template.jinja"), "the tokenizer has no chat template"),
        (str(bert), "has no linear layer `score`"),
        (str(gptj), "uses attention 'eager' of its own, which lets packed sequences attend to each other"),
    ):
        with pytest.raises(ModelError, match=text) as caught:
            load_reward(config_of(path))
        assert "\n" not in str(caught.value)
    with pytest.raises(ValidationError, match="token_budget = 50 is less than max_tokens = 100"):
        config_of(folder, token_budget=50)


def test_weights_that_are_missing_are_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    deeper = changed(folder, tmp_path / "deeper", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ModelError, match=r"layers\.2\..* are missing, and would be random"):
        open_reward_scorer(config_of(deeper), open_model_here)


def test_padding_at_the_end_of_a_text_is_ignored_as_by_transformers(folder: Path, tmp_path: Path) -> None:
    ends_in_padding = Path(changed(folder, tmp_path / "padded", pad_token_id=make_tokenizer().eos_token_id))
    found = [outcome.reward for outcome in scores(config_of(ends_in_padding), "4", "5")]
    assert found == pytest.approx([plain_score(ends_in_padding, each) for each in ("4", "5")], abs=1e-5)
    assert found != [outcome.reward for outcome in scores(config_of(folder), "4", "5")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_checked_against_its_own_forward(folder: Path, dtype: torch.dtype) -> None:
    model = Qwen3ForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    prepare_pooled(model)
    row = pack_whole([[1, 2, 3], [4, 5]], model.device)
    assert packed_pooled_scores(model, row).dtype == torch.float32
