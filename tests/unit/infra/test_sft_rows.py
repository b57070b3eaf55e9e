"""Rows of supervised fine-tuning: which of their tokens have a loss, and what is refused."""

import json
import logging
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from flows.cli.example import example_lines, show_example
from infra.datasets import sft
from infra.datasets.sft import SftRow, check_rows, load_rows, load_train_rows
from infra.models.load import load_tokenizer
from infra.models.tiny import CHAT_TEMPLATE, make_tokenizer
from rl_core.rollout.chat import ChatTemplate, decode_text
from schemas.errors import ConfigError, DataError
from tests.support.sft import (
    CALLING,
    MARKED,
    MARKED_CALLING,
    OPEN_ENDED,
    PROMPTED_THINKING,
    THINKING,
    UNCLOSED,
    calling,
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


def load(folder: Path, *rows: dict[str, Any], template: str = CHAT_TEMPLATE, **settings: Any) -> list[SftRow]:
    write_rows(folder / "rows.jsonl", rows)
    config = sft_config(folder, sft=settings)
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


ANSWERS = [{"role": "tool", "name": name, "content": text} for name, text in (("add", "3"), ("sub", "1"))]
CALLS = [
    *chat("2 + 1 ="),
    calling(("add", {"a": 2, "b": {"c": 'say "<|end|>"', "d": None}}), ("sub", '{"a": 2, "b": null}'), content="so"),
    *ANSWERS,
    *chat("", "3")[1:],
    *chat("and 1 ="),
    calling(("add", None)),
]


@pytest.mark.parametrize("template", [CALLING, MARKED_CALLING])
def test_tool_calls_are_part_of_a_turn(folder: Path, template: str) -> None:
    name = "end" if template == MARKED_CALLING else "<|end|>"  # marked turns have no control token in their texts
    (row,) = load(folder, json.loads(json.dumps({"messages": CALLS}).replace("<|end|>", name)), template=template)
    assert marked(folder, row) == (
        '<|user|>2 + 1 =<|assistant|>[so<call>add {"a": 2, "b": {"c": "say \\"' + name + '\\""}}'
        '<call>sub {"a": 2, "b": null}<|end|>]<|tool|>3<|tool|>1<|assistant|>[3<|end|>]'
        "<|user|>and 1 =<|assistant|>[<call>add {}<|end|>]"
    )
    ends = row.loss_mask & (row.response_ids == tokenizer_of(folder).eos_token_id)
    assert ends.sum() == 3


def test_parquet_gives_all_calls_the_same_arguments(folder: Path) -> None:
    turns = [*chat("2 + 1 ="), calling(("add", {"a": 2}), ("sub", {"b": 1})), *ANSWERS, *chat("", "3")[1:]]
    (folder / "parquet").mkdir()
    write_rows(folder / "parquet/rows.parquet", [{"messages": turns, "tools": '[{"name": "add"}]'}])
    path = str(folder / "parquet/rows.parquet")
    (row,) = load_rows(path, sft_config(folder), tokenizer_of(folder, CALLING))
    assert marked(folder, row) == (
        '{"name": "add"}<|user|>2 + 1 =<|assistant|>[<call>add {"a": 2}<call>sub {"b": 1}<|end|>]'
        "<|tool|>3<|tool|>1<|assistant|>[3<|end|>]"
    )


def test_tools_of_a_file(folder: Path) -> None:
    tools = [{"name": "add"}]
    given = [{"messages": TWO_TURNS[:2], **row} for row in ({}, {"tools": None}, {"tools": []}, {"tools": "[{}]"})]
    texts = [marked(folder, row) for row in load(folder, *given, template=CALLING, tools=tools)]
    assert [text.partition("<|user|>")[0] for text in texts] == ['{"name": "add"}', '{"name": "add"}', "", "{}"]
    assert len(load(folder, {"text": "once"}, template=CALLING, tools=tools)) == 1  # they are those of chats
    with pytest.raises(
        DataError, match=r"row 1: .* no variable `tools`.* use a model whose chat_template.jinja has it$"
    ):
        load(folder, {"messages": TWO_TURNS}, tools=tools)


def test_a_template_that_leaves_out_a_call_is_refused_by_row(folder: Path) -> None:
    first = CALLING.replace("message['tool_calls'] or []", "(message['tool_calls'] or [])[:1]")
    told = r"row 2: the chat template of .* leaves out {} of message 1, of role 'assistant'; write it into a message's"
    for template, part in ((CHAT_TEMPLATE, "tool call 1"), (first, "tool call 2")):
        with pytest.raises(DataError, match=told.format(part)):
            load(folder, {"messages": TWO_TURNS}, {"messages": CALLS}, template=template)


def test_a_turn_with_an_end_in_its_middle_is_refused(folder: Path) -> None:
    """What follows it would have no loss."""
    template = CALLING.replace("<call>", "<|end|><call>")
    assert template != CALLING
    with pytest.raises(DataError, match=r"row 1: .* so that its tokens can't be told from those around it"):
        load(folder, {"messages": CALLS[:2]}, template=template)


def test_the_reasoning_is_part_of_a_turn(folder: Path) -> None:
    thoughtful = THINKING.replace("'<think></think>'", "'<think>' + (message['thinking'] or '') + '</think>'")
    first, last = ({**message, "thinking": "one more"} for message in TWO_TURNS[1::2])
    messages = [TWO_TURNS[0], first, TWO_TURNS[2], last]
    (row,) = load(folder, {"messages": messages}, template=thoughtful)
    assert marked(folder, row) == (
        "<|user|>2 + 1 =<|end|>\n<|assistant|>[3<|end|>]\n"
        "<|user|>and 2 =<|end|>\n<|assistant|>[<think>one more</think>5<|end|>]"
    )
    with pytest.raises(DataError, match=r"row 1: .* leaves out thinking of message 3, of role 'assistant'"):
        load(folder, {"messages": messages}, template=THINKING)


REASONS = {
    "glm4moe_training": "reasoning_content",
    "gptoss_training": "thinking",
    "qwen3_training": "reasoning_content",
}


@pytest.mark.parametrize("name", REASONS)
def test_reasoning_by_tokens_is_in_the_turns_that_trl_marks(name: str) -> None:
    marks = read_trl_template(name)
    tokenizer = make_tokenizer()
    stops = ["<|im_end|>", "<|return|>", "<|user|>"]
    others = ["<|im_start|>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*stops, *others]})
    tokenizer.chat_template = without_marks(marks)
    question, answer = chat("2 + 1 =", "3")
    messages = [question, {**answer, REASONS[name]: "one more than 2"}]
    ids, (span,) = ChatTemplate(tokenizer).encode_turns(messages, tokenizer.convert_tokens_to_ids(stops))
    theirs: Any = tokenizer.apply_chat_template(
        *(messages, None, None, marks), return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == theirs["input_ids"]
    turn = decode_text(tokenizer, ids[span.start : span.stop])
    expected = [token for token, has_loss in zip(ids, theirs["assistant_masks"], strict=True) if has_loss]
    begun = "<|start|>assistant" * (name == "gptoss_training")  # of the prompt: its marks begin too early
    assert begun + turn == decode_text(tokenizer, expected).removesuffix("\n")
    assert "one more than 2" in turn


def read_trl_template(name: str) -> str:
    """Return a template of TRL's, which marks turns."""
    if (trl := find_spec("trl")) is None or trl.origin is None:
        pytest.skip("TRL is not installed")
    return (Path(trl.origin).parent / f"chat_templates/{name}.jinja").read_text()


def without_marks(template: str) -> str:
    return re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", r"{%\1 set _ = 0 \2%}", template)


@pytest.mark.parametrize("name", ["qwen3_training", "qwen3_instruct_2507_training", "glm4moe_training", "lfm2_2_5"])
def test_turns_by_tokens_are_those_that_trl_marks(name: str) -> None:
    """TRL's templates mark turns; without their marks, they are found by tokens, but for a line break after them."""
    marks = read_trl_template(name)
    tokenizer = make_tokenizer()
    stops = ["<|im_end|>", "<|observation|>", "<|user|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*stops, "<|im_start|>"]})
    tokenizer.chat_template = without_marks(marks)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "number"}}}}}]
    messages = [
        *({"role": "system", "content": "be brief"}, *chat("2 + 1 =")),
        calling(("add", {"a": 2, "b": "é\n"}), ("sub", {"c": [1, {"d": 2}]}), content="so"),
        *(*ANSWERS, *chat("", "3", "and 1 =")[1:], calling(("add", {"a": 1.5}), content="")),
    ]
    ids, spans = ChatTemplate(tokenizer, {}, tools).encode_turns(messages, tokenizer.convert_tokens_to_ids(stops))
    theirs: Any = tokenizer.apply_chat_template(
        *(messages, tools, None, marks), return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == theirs["input_ids"]
    (line,) = tokenizer.encode("\n")
    ours = np.zeros(len(ids), dtype=bool)
    for span in spans:
        ours[span.start : span.stop + (name != "glm4moe_training" and ids[span.stop] == line)] = True
    assert ours.tolist() == [bool(value) for value in theirs["assistant_masks"]]


def test_many_lists_of_tools_take_bounded_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(ChatTemplate):
        made, alive, most = 0, WeakSet[ChatTemplate](), 0

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            Counted.alive.add(self)
            Counted.made, Counted.most = Counted.made + 1, max(Counted.most, len(Counted.alive))

    monkeypatch.setattr(sft, "ChatTemplate", Counted)
    rows = [{"messages": TWO_TURNS, "tools": [{"name": f"add{number // 2}"}]} for number in range(200)]
    assert len(load(folder, *rows, template=CALLING)) == 200
    assert Counted.made == 100  # once for each list
    assert Counted.most <= 33


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
        (
            {"messages": [*chat("a"), {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {}}]}]},
            r"row 1: messages\[1\].tool_calls is .*; expected a list such as \[{\"type\": \"function\", \"function\"",
        ),
        ({"messages": [*chat("a"), calling(("add", "[1]"))]}, "the arguments of a tool call is '.1.', of type list"),
        ({"messages": [{**calling(("add", {})), "role": "user"}]}, "of role 'user', has 'tool_calls'"),
        ({"messages": [*chat("a", "b"), {"role": "tool", "content": "3", "name": 3}]}, "strings for role, content, na"),
        ({"messages": [{**TWO_TURNS[0], "name": "Ann"}]}, "of role 'user', has 'name', which the prompt would lack"),
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


def test_each_of_several_sources_has_epochs_of_its_own(folder: Path) -> None:
    for name, size in (("a", 2), ("b", 8)):
        write_rows(folder / f"{name}.jsonl", [{"text": name * 2}] * size)
    sources = [{"path": str(folder / f"{name}.jsonl")} for name in ("a", "b")]
    config = sft_config(folder, data={"train_path": None, "sources": sources}, sft={"num_rows": 4})
    rows = load_train_rows(config, tokenizer_of(folder))
    taken = [row for step in range(4) for row in rows.rows_for_step(step, 4, seed=0, shuffle=True)]
    assert [taken.count(row) for row in range(10)] == [4, 4, *[1] * 8]
    metrics = rows.epoch_metrics(3, 4, config.data.source_names)
    assert {name: metric.value for name, metric in metrics.items()} == {"epoch": 1.0, "epoch/a": 4.0, "epoch/b": 1.0}
    line = next(example_lines(show_example(config, rows)))
    assert line.endswith("an epoch is 4 steps (of a 1, of b 4)")
    one = load_train_rows(sft_config(folder, "a.jsonl", sft={"num_rows": 4}), tokenizer_of(folder))
    assert {name: metric.value for name, metric in one.epoch_metrics(0, 3, ["a"]).items()} == {"epoch": 1.5}
