"""Rows of supervised fine-tuning: which of their tokens have a loss, and what is refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from infra.datasets.sft import SftRow, check_rows, load_rows, load_train_rows
from infra.models.load import load_tokenizer
from infra.models.tiny import CHAT_TEMPLATE
from rl_core.rollout.chat import ChatTemplate, decode_text
from schemas.errors import ConfigError, DataError
from tests.support.sft import (
    MARKED,
    OPEN_ENDED,
    PROMPTED_THINKING,
    THINKING,
    UNCLOSED,
    chat,
    sft_config,
    sums,
)
from tests.support.tiny import make_tiny_model, write_rows

TWO_TURNS = chat("2 + 1 =", "3", "and 2 =", "5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sft")
    make_tiny_model(path / "model")
    return path


def tokenizer_of(folder: Path, template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = load_tokenizer(sft_config(folder).model)
    tokenizer.chat_template = template
    return tokenizer


def load(folder: Path, *rows: dict[str, Any], template: str = CHAT_TEMPLATE, **sft: Any) -> list[SftRow]:
    write_rows(folder / "rows.jsonl", rows)
    config = sft_config(folder, sft=sft)
    return list(load_rows(str(folder / "rows.jsonl"), config, tokenizer_of(folder, template)))


def marked(folder: Path, row: SftRow) -> str:
    """Return a row's text, with brackets around its tokens with loss."""
    tokenizer = tokenizer_of(folder)
    text = decode_text(tokenizer, row.prompt_ids.tolist())
    for token, has_loss in zip(row.response_ids.tolist(), row.loss_mask.tolist(), strict=True):
        text += f"[{decode_text(tokenizer, [token])}]" if has_loss else decode_text(tokenizer, [token])
    return text.replace("][", "")


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED])
def test_each_turn_of_the_assistant_has_a_loss(folder: Path, template: str) -> None:
    (row,) = load(folder, {"messages": TWO_TURNS}, template=template)
    assert marked(folder, row) == ("<|user|>2 + 1 =<|assistant|>[3<|end|>]<|user|>and 2 =<|assistant|>[5<|end|>]")


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED])
def test_or_the_last_one_alone(folder: Path, template: str) -> None:
    (row,) = load(folder, {"messages": TWO_TURNS}, template=template, loss_on="last_turn")
    assert marked(folder, row) == "<|user|>2 + 1 =<|assistant|>3<|end|><|user|>and 2 =<|assistant|>[5<|end|>]"


def test_or_every_token_but_the_first_which_nothing_predicts(folder: Path) -> None:
    (row,) = load(folder, {"messages": TWO_TURNS[:2]}, loss_on="all")
    assert marked(folder, row) == "<|user|>[2 + 1 =<|assistant|>3<|end|>]"


def test_a_turn_that_is_written_in_another_way_as_the_last_one(folder: Path) -> None:
    (row,) = load(folder, {"messages": TWO_TURNS}, template=THINKING)
    assert marked(folder, row) == (
        "<|user|>2 + 1 =<|end|>\n<|assistant|>[3<|end|>]\n"
        "<|user|>and 2 =<|end|>\n<|assistant|>[<think></think>5<|end|>]"
    )


def test_a_prompt_that_ends_in_another_way_than_earlier_turns_begin(folder: Path) -> None:
    (row,) = load(folder, {"messages": TWO_TURNS}, template=PROMPTED_THINKING)
    assert marked(folder, row) == (
        "<|user|>2 + 1 =<|end|>\n<|assistant|>[3<|end|>]\n"
        "<|user|>and 2 =<|end|>\n<|assistant|><think></think>[5<|end|>]"
    )


def test_a_turn_that_ends_with_the_beginning_of_the_next_message(folder: Path) -> None:
    tokenizer = tokenizer_of(folder, UNCLOSED)
    (end,) = tokenizer.encode("<|user|>")
    ids, spans = ChatTemplate(tokenizer).encode_turns(TWO_TURNS, [end])
    assert [decode_text(tokenizer, ids[span.start : span.stop]) for span in spans] == ["3<|user|>", "5"]


def test_a_turn_that_cannot_be_told_is_refused_by_row_and_template(folder: Path) -> None:
    with pytest.raises(DataError, match=r"row 2: the chat template of .*model writes message 1, of role 'assistant'"):
        load(folder, {"messages": chat("a", "b")}, {"messages": chat("a", "b", "c", "d")}, template=OPEN_ENDED)


def test_a_template_that_marks_other_turns_is_refused(folder: Path) -> None:
    template = MARKED.replace("message['role'] == 'assistant' %}{% gen", "message['content'] == '5' %}{% gen")
    with pytest.raises(DataError, match=r"marks 1 turns by {% generation %} in a chat with 2 of role 'assistant'"):
        load(folder, {"messages": TWO_TURNS}, template=template)


def test_a_control_token_in_a_text_is_text(folder: Path) -> None:
    (row,) = load(folder, {"messages": chat("say <|end|>", "it is <|end|>.", "why", "so")})
    end = tokenizer_of(folder).eos_token_id
    assert row.response_ids.tolist().count(end) == 2
    assert marked(folder, row).endswith("[it is <|end|>.<|end|>]<|user|>why<|assistant|>[so<|end|>]")
    with pytest.raises(DataError, match=r"texts without control tokens only, not with '<\|end\|>'"):
        load(folder, {"messages": chat("say <|end|>", "no")}, template=MARKED)


def test_prompts_with_completions(folder: Path) -> None:
    rows = load(
        folder,
        {"prompt": "2 + 1 = ", "completion": "3"},
        {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]},
        {"prompt": "2 + 1 =", "completion": TWO_TURNS[1:2]},
        {"prompt": TWO_TURNS[:3], "completion": "5"},
    )
    last = "<|user|>2 + 1 =<|assistant|>3<|end|><|user|>and 2 =<|assistant|>[5<|end|>]"
    one = "<|user|>2 + 1 =<|assistant|>[3<|end|>]"
    assert [marked(folder, row) for row in rows] == ["2 + 1 = [3<|end|>]", last, one, last]


def test_texts_and_chats_of_sharegpt(folder: Path) -> None:
    rows = load(
        folder,
        {"text": "once"},
        {"conversations": [{"from": "human", "value": "2 + 1 ="}, {"from": "gpt", "value": "3"}]},
    )
    assert [marked(folder, row) for row in rows] == ["o[nce<|end|>]", "<|user|>2 + 1 =<|assistant|>[3<|end|>]"]


def test_the_template_shows_a_row_s_own_tools(folder: Path) -> None:
    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHAT_TEMPLATE
    add, turns = {"name": "add"}, [*chat("2 + 1 =", "add"), {"role": "tool", "content": "3"}, *chat("", "3")[1:]]
    rows = load(
        folder,
        {"messages": turns, "tools": [{**add, "strict": None}]},
        {"prompt": turns[:3], "completion": "3", "tools": '[{"name": "add"}]'},
        {"messages": turns[:2], "tools": []},
        template=template,
    )
    shown = '{"name": "add"}<|user|>2 + 1 =<|assistant|>'
    assert [marked(folder, row) for row in rows] == [
        shown + "[add<|end|>]<|tool|>3<|assistant|>[3<|end|>]",
        shown + "add<|end|><|tool|>3<|assistant|>[3<|end|>]",
        "<|user|>2 + 1 =<|assistant|>[add<|end|>]",
    ]


def test_tokens_of_stored_steps(folder: Path) -> None:
    (chosen,) = load(folder, {"messages": TWO_TURNS})
    prompt, response = chosen.prompt_ids.tolist(), chosen.response_ids.tolist()
    masked = {"prompt_ids": prompt, "response_ids": response, "loss_mask": chosen.loss_mask.tolist()}
    whole, last = load(folder, masked)[0], load(folder, masked, loss_on="last_turn")[0]
    assert marked(folder, whole) == marked(folder, chosen)
    assert marked(folder, last) == marked(folder, load(folder, {"messages": TWO_TURNS}, loss_on="last_turn")[0])
    (unmasked,) = load(folder, {"prompt_ids": prompt, "response_ids": response})
    assert unmasked.response_ids.tolist() == response
    assert unmasked.loss_mask.all()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_ids": [1], "response_ids": [10**6]}, r"row 1: response_ids is \[1000000\]; expected a list of token"),
        ({"prompt_ids": [1], "response_ids": [2.0]}, r"row 1: response_ids is \[2.0\]; expected a list of token ids"),
        ({"prompt_ids": [1], "response_ids": [2], "loss_mask": [1]}, "row 1: loss_mask is .* each of the 1 tokens"),
        ({"prompt_ids": [1], "response_ids": []}, "row 1: none of its tokens has a loss"),
        ({"prompt_ids": [], "response_ids": []}, "row 1: none of its tokens has a loss"),
        (
            {"question": "a"},
            "row 1: it has the columns question, but supervised fine-tuning needs prompt_ids and response_ids, or",
        ),
        ({"messages": chat("a")}, "row 1: no message of role 'assistant' to train on"),
        ({"text": 3}, "row 1: text is 3; expected a text"),
        ({"messages": TWO_TURNS, "tools": "add"}, "tools is 'add'; expected a list of JSON schemas, or its JSON text"),
        ({"messages": TWO_TURNS, "tools": [{"name": "add"}]}, "the model's chat template has no variable `tools`"),
        ({"text": "once", "tools": [{"name": "add"}]}, "row 1: a text has no place for its tools"),
        ({"messages": TWO_TURNS, "images": ["x"]}, "'images' can't be part of the row"),
        ({"messages": [{"role": "user"}]}, r"row 1: messages\[0\] is .*; expected strings for role and content"),
        ({"text": "x" * 300}, "row 1: it has 301 tokens, more than sft.max_tokens = 200"),
    ],
)
def test_rows_that_are_refused(folder: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(folder, row)


def test_longer_rows_are_dropped_if_asked_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(folder / "some.jsonl", [{"text": "x" * length} for length in (10, 300, 20)])
    config = sft_config(folder, "some.jsonl", data={"overlong": "drop"})
    with caplog.at_level(logging.WARNING):
        rows = load_train_rows(config, tokenizer_of(folder))
    assert (len(rows), rows.num_dropped, rows.longest) == (2, 1, 21)
    assert "dropped 1 of 3 rows, longer than 200 tokens" in caplog.text


def test_rows_must_fit_model_and_micro_batch(folder: Path) -> None:
    write_rows(folder / "some.jsonl", [{"text": "x" * 99}])
    config = sft_config(folder, "some.jsonl", packing={"token_budget": 80})
    rows = load_train_rows(config, tokenizer_of(folder))
    with pytest.raises(ConfigError, match=r"100 tokens, more than packing\.token_budget = 80; raise it to at least"):
        check_rows(config, rows, None, 512)
    with pytest.raises(ConfigError, match="100 tokens, more than the 90 positions of the model"):
        check_rows(config, rows, None, 90)


def test_parquet_and_csv_have_the_columns_too(folder: Path) -> None:
    write_rows(folder / "rows.parquet", [{**sums(number), "id": number} for number in range(3)])
    (folder / "rows.csv").write_text("prompt,completion,id\n2 + 1 =,3,0\n")
    tokenizer = tokenizer_of(folder)
    parquet = load_train_rows(sft_config(folder, "rows.parquet"), tokenizer)
    assert marked(folder, parquet[1]) == "<|user|>1 + 1 =<|assistant|>[2<|end|>]"
    assert marked(folder, load_train_rows(sft_config(folder, "rows.csv"), tokenizer)[0]) == "2 + 1 =[3<|end|>]"


def test_several_sources_are_mixed_by_weight(folder: Path) -> None:
    write_rows(folder / "a.jsonl", [{"text": "aa"}])
    write_rows(folder / "b.jsonl", [{"text": "bb"}])
    sources = [{"path": str(folder / "a.jsonl"), "weight": 3.0}, {"path": str(folder / "b.jsonl")}]
    config = sft_config(folder, data={"train_path": None, "sources": sources})
    rows = load_train_rows(config, tokenizer_of(folder))
    taken = [marked(folder, rows[number])[0] for number in rows.rows_for_step(0, 8, seed=0, shuffle=True)]
    assert (taken.count("a"), taken.count("b")) == (6, 2)
