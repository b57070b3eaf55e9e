"""Chat templates that leave out what they are given, fail, or don't begin the model's turn."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from infra.datasets import load_prompts
from infra.models.tiny import CHAT_TEMPLATE, make_tokenizer
from rl_core.rollout.chat import ChatTemplate
from schemas.config.data import DataConfig
from schemas.errors import DataError
from tests.support.tiny import tiny_row, write_rows

USERS = (
    "{% for message in messages %}{% if message.role in ('user', 'assistant') %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)
FIRST_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'user' or loop.first %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)
PARTS = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)
SYSTEM, USER = ({"role": role, "content": f"as {role}"} for role in ("system", "user"))


def tokenizer_with(template: object) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def load_chat(folder: Path, template: object, *chats: list[dict]) -> None:
    path = write_rows(folder / "rows.jsonl", [tiny_row(0) | {"prompt": chat} for chat in chats])
    load_prompts(str(path), DataConfig(train_path=str(path)), tokenizer_with(template))


@pytest.mark.parametrize(
    ("template", "chat", "left_out"),
    [
        (USERS, [{"role": "developer", "content": "Be brief."}, USER], "prompt[0], of role 'developer'"),
        (USERS, [USER, {"role": "tool", "content": "4"}], "prompt[1], of role 'tool'"),
        (FIRST_SYSTEM, [SYSTEM, SYSTEM, USER], "prompt[1], of role 'system'"),
        (PARTS, [USER], "prompt[0], of role 'user'"),
        ("Hello", [USER], "prompt[0], of role 'user'"),
    ],
)
def test_a_message_that_a_template_leaves_out(tmp_path: Path, template: str, chat: list, left_out: str) -> None:
    with pytest.raises(DataError) as caught:
        load_chat(tmp_path, template, chat)
    assert str(caught.value).startswith(f"{tmp_path}/rows.jsonl, row 1: the model's chat template leaves out the")
    assert left_out in str(caught.value)


def test_chats_of_other_shapes_are_looked_at_too(tmp_path: Path) -> None:
    load_chat(tmp_path, FIRST_SYSTEM, [SYSTEM, USER], [USER], [SYSTEM, USER, {"role": "system", "content": " "}])
    with pytest.raises(DataError, match=r"row 3: .* leaves out the content of prompt\[1\], of role 'system'"):
        load_chat(tmp_path, FIRST_SYSTEM, [SYSTEM, USER], [USER], [SYSTEM, SYSTEM, USER])


def test_a_content_that_a_template_cuts_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = CHAT_TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1].strip()")
    load_chat(tmp_path, template, [{"role": "user", "content": " 2 + 2?\n"}])
    assert not caplog.records
    load_chat(tmp_path, template, [USER], [USER, {"role": "assistant", "content": "<think>so</think>4"}, USER])
    assert "row 2: the model's chat template cuts or changes the content of prompt[1], of role 'assistant' (1 such" in (
        caplog.text
    )


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("1 // (messages|length - 2)", "ZeroDivisionError"),
        ("messages[1].content + 1", "TypeError"),
        ("{}|first.x", "TemplateRuntimeError"),
    ],
)
def test_a_template_that_fails_for_a_row(tmp_path: Path, expression: str, error: str) -> None:
    template = f"{CHAT_TEMPLATE}{{% if messages|length == 2 %}}{{{{ {expression} }}}}{{% endif %}}"
    with pytest.raises(DataError, match=rf"row 2: .* fails on a chat of the roles system, user: {error}") as caught:
        load_chat(tmp_path, template, [USER], [SYSTEM, USER])
    assert str(caught.value).endswith("; correct its chat_template.jinja")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "error", "advice"),
    [
        ("{{ messages", "fails on .* TemplateSyntaxError", "correct its chat_template.jinja"),
        (
            "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
            "fails on .* RecursionError",
            "correct its chat_template.j",
        ),
        ("{{ raise_exception('no user\nhere') }}", "rejects .* user: no user here", "change the roles of the row's"),
    ],
)
def test_the_advice_for_a_template_that_takes_no_chat(tmp_path: Path, template: str, error: str, advice: str) -> None:
    with pytest.raises(DataError, match=f"row 1: .*{error}.*; {advice}") as caught:
        load_chat(tmp_path, template, [USER])
    assert "\n" not in str(caught.value)


def test_several_named_templates() -> None:
    with_tools = CHAT_TEMPLATE + "{{ tools|length }}"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    named = tokenizer_with({"default": CHAT_TEMPLATE, "tool_use": with_tools})
    assert ChatTemplate(named).render([USER]) == "<|user|>as user<|assistant|>"
    assert ChatTemplate(named, tools=tools).render([USER]) == "<|user|>as user<|assistant|>1"
    named = tokenizer_with({"rag": CHAT_TEMPLATE, "tool_use": with_tools})
    assert ChatTemplate(named, tools=tools).render([USER]) == "<|user|>as user<|assistant|>1"
    with pytest.raises(DataError, match=r"several chat templates \(rag, tool_use\) but none named default;"):
        ChatTemplate(named)


@pytest.mark.parametrize(
    ("template", "missing"),
    [
        (CHAT_TEMPLATE, ""),
        (CHAT_TEMPLATE.split("{% if add_generation_prompt %}")[0], "<|assistant|>"),
        # As of Mistral: the user's turn ends with what begins the model's.
        ("{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content }}"
         "{% endfor %}", ""),
    ],
)  # fmt: skip
def test_a_missing_generation_prompt(template: str, missing: str) -> None:
    assert ChatTemplate(tokenizer_with(template)).find_missing_prompt([USER]) == missing


def test_the_date_of_a_template_is_the_one_that_is_set() -> None:
    tokenizer = tokenizer_with("Today: {{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE)
    chat = ChatTemplate(tokenizer, {"strftime_now": "2024-02-01"})
    assert chat.render([USER]) == "Today: 01 Feb 2024<|user|>as user<|assistant|>"
    with pytest.raises(DataError, match=r"strftime_now is 'today'; expected a date such as 2026-01-31"):
        ChatTemplate(tokenizer, {"strftime_now": "today"})
