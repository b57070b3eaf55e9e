"""Prompt files of several formats: the rows that they give, and what is said about unusable ones."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.datasets import load_train_prompts
from infra.models.tiny import CHAT_TEMPLATE
from rl_core.rollout.chat import ChatTemplate
from rl_core.rollout.control_tokens import Messages
from schemas.config.data import DataConfig
from schemas.errors import DataError
from tests.support.dataset_rows import TOKENIZER, load, write_folder
from tests.support.tiny import make_tiny_data, tiny_row, write_rows


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_rows_have_the_chat_template_applied(tmp_path: Path, name: str) -> None:
    prompts = load(make_tiny_data(tmp_path / name, 3))
    assert len(prompts) == 3
    row = prompts[2]
    assert TOKENIZER.decode(row.prompt_ids) == "<|user|>2 + 1 =<|assistant|>"
    assert row.prompt_ids.dtype == np.int32
    assert (row.prompt_text, row.answer, row.data_source) == ("2 + 1 =", "3", "tiny")
    assert row.info == {"index": 2, "split": "train", "data_source": "tiny"}


def test_several_messages_and_an_answer_that_is_not_a_string(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    row = tiny_row(0) | {"prompt": chat, "reward_model": {"ground_truth": [4, "four"]}, "extra_info": None}
    prompts = load(write_rows(tmp_path / "rows.jsonl", [row]))
    assert prompts[0].prompt_text == "Be brief.\n\n2 + 2?"
    assert prompts[0].answer == '[4, "four"]'
    assert prompts[0].info == {"data_source": "tiny"}


def test_variables_reach_the_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thinking = "{% if enable_thinking is false %}<think></think>{% endif %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", CHAT_TEMPLATE + thinking)
    path = make_tiny_data(tmp_path / "rows.jsonl", 1)
    prompts = load(path, chat_template_kwargs={"enable_thinking": False})
    assert TOKENIZER.decode(prompts[0].prompt_ids) == "<|user|>0 + 1 =<|assistant|><think></think>"
    assert TOKENIZER.decode(load(path)[0].prompt_ids) == "<|user|>0 + 1 =<|assistant|>"
    with pytest.raises(DataError, match="chat template has no variable thinking_enabled"):
        load(path, chat_template_kwargs={"thinking_enabled": False})
    with pytest.raises(ValueError, match="add_generation_prompt can't be set"):
        load(path, chat_template_kwargs={"add_generation_prompt": False})


def test_rows_that_are_tokenized_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_data(tmp_path / "rows.jsonl", 5)
    whole = load(path)
    monkeypatch.setattr("infra.datasets.load._BATCH_ROWS", 2)
    in_batches = load(path)
    assert [in_batches[row].prompt_ids.tolist() for row in range(5)] == [
        whole[row].prompt_ids.tolist() for row in range(5)
    ]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load(tmp_path / "none.parquet")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("rows.parquet", b"not parquet", "can't be read as Parquet"),
        ("rows.txt", b"a,b", "unknown kind of data file; give one of .parquet"),
        ("rows.xlsx", b"PK", "pandas.read_excel("),
        ("rows.csv", b"a,b\n", "no column 'data_source'; it has a, b but needs"),
        ("rows.jsonl.gz", b"{}", "can't be read: Not a gzipped file"),
        ("rows.jsonl", b"", "has no rows"),
        ("rows.jsonl", b"\xff\xfe", "can't be read as UTF-8"),
        ("rows.jsonl", b"[1]\n", "row 1: expected a JSON object, found list"),
        ("rows.jsonl", b"{}\n{\n", "row 1: column 'data_source' is missing"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(tmp_path / name)
    assert text in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_a_line_that_is_not_json(tmp_path: Path) -> None:
    path = make_tiny_data(tmp_path / "rows.jsonl", 2)
    path.write_text(path.read_text() + '{"prompt":\n')
    with pytest.raises(DataError, match="row 3: not JSON"):
        load(path)


def test_what_a_line_can_not_hold(tmp_path: Path) -> None:
    path = make_tiny_data(tmp_path / "rows.jsonl", 1)
    for line, text in (("9" * 5000, "a number has too many digits"), ("[" * 100_000, "its JSON can't be read")):
        path.write_text(line + "\n")
        with pytest.raises(DataError, match=f"row 1: .*{text}"):
            load(path)


def test_a_parquet_file_without_a_column(tmp_path: Path) -> None:
    path = make_tiny_data(tmp_path / "rows.parquet", 2)
    pq.write_table(pq.read_table(path).drop_columns(["reward_model"]), path)
    with pytest.raises(DataError, match="no column 'reward_model'; it has data_source, prompt, extra_info but needs"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [{"role": "user", "content": " \n"}]}, "the prompt is empty"),
        ({"prompt": None}, "column 'prompt' is missing or null"),
        ({"prompt": 4}, "prompt is int; expected a chat list"),
        ({"prompt": {"role": "user"}}, "prompt[0] is {'role': 'user'}"),
        ({"prompt": '{"role": "user"}'}, "prompt[0] is {'role': 'user'}"),
        (
            {"prompt": str([{"role": "user", "content": "a"}])},
            "row['prompt'] = json.dumps(ast.literal_eval(row['prompt']))",
        ),
        ({"prompt": "[{'content': 'a', 'role': 'user'}\n {'content': 'b'}]"}, "save the rows with to_parquet"),
        ({"prompt": str({"role": "user", "content": "a"})}, "but not JSON: it is Python's, which to_csv writes"),
        ({"prompt": '[{"role": "user", "content": "a",}]'}, ", but not JSON: "),
        ({"prompt": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}, "has 'tool_calls', which"),
        ({"prompt": [{"role": "user"}]}, "prompt[0] is {'role': 'user'}"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "prompt[0] has a part of type 'image'; expected text parts alone",
        ),
        ({"prompt": [{"role": "user", "content": "a", "name": "Ada"}]}, "prompt[0], of role 'user', has 'name'"),
        ({"prompt": [{"role": "user", "content": "\ud83d"}]}, "prompt[0] has the lone surrogate '\\ud83d'"),
        ({"images": [{"bytes": "AA=="}]}, "the column 'images' can't be part of the prompt"),
        ({"tools": [{"name": "add"}]}, "name them in environment.tools"),
        ({"chat_template_kwargs": {"thinking": True}}, "set data.chat_template_kwargs"),
        ({"data_source": 3}, "data_source is 3"),
        ({"reward_model": {"style": "rule"}}, "reward_model.ground_truth is missing or null"),
        ({"reward_model": "4"}, "reward_model is '4', of type int; expected"),
        ({"reward_model": str({"ground_truth": "4"})}, "row['reward_model'] = json.dumps(ast.literal_eval("),
        ({"extra_info": str({"a": None})}, "row['extra_info'] = json.dumps(ast.literal_eval(row['extra_info']))"),
        ({"reward_model": {"ground_truth": float("nan")}}, "reward_model.ground_truth has NaN or an infinite number"),
        ({"reward_model": '{"ground_truth": [1e999]}'}, "reward_model.ground_truth has NaN or an infinite number"),
        ({"extra_info": {"a": [float("-inf")]}}, "extra_info has NaN or an infinite number; write null"),
        ({"reward_model": {"ground_truth": "\ud83d"}}, "reward_model.ground_truth has the lone surrogate"),
        ({"reward_model": {"ground_truth": ["\ud83d"]}}, "reward_model.ground_truth has the lone surrogate"),
        ({"data_source": "\ud83d"}, "data_source has the lone surrogate"),
        ({"extra_info": "x"}, "extra_info is the text 'x', which isn't the JSON of an object"),
        ({"extra_info": []}, "extra_info is [], of type list; expected an object, or null"),
        ({"extra_info": 0}, "extra_info is 0, of type int"),
        ({"extra_info": False}, "extra_info is False, of type bool"),
        ({"extra_info": {"a": [{"b\ud83d": 1}]}}, "extra_info has the lone surrogate"),
        ({"extra_info": {"data_source": "b"}}, "extra_info.data_source is 'b', but the row's data_source is 'tiny'"),
    ],
)
def test_an_unusable_row_is_named(tmp_path: Path, changes: dict, text: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [tiny_row(0), tiny_row(1) | changes])
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}, row 2: ")
    assert text in str(caught.value)


def test_a_null_in_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    row = tiny_row(0)
    pq.write_table(pa.Table.from_pylist([row, row | {"reward_model": {"style": "rule", "ground_truth": None}}]), path)
    with pytest.raises(DataError, match=r"row 2: reward_model\.ground_truth is missing or null"):
        load(path)


def test_a_prompt_that_is_too_long(tmp_path: Path, caplog) -> None:
    rows = [tiny_row(0), tiny_row(1, prompt="1" * 100), tiny_row(2)]
    path = write_rows(tmp_path / "rows.parquet", rows)
    # 100 bytes between <|user|> and <|assistant|>
    with pytest.raises(DataError, match=r"row 2: the prompt has 102 tokens.*data\.max_prompt_tokens = 64"):
        load(path, max_prompt_tokens=64)
    with caplog.at_level(logging.WARNING):
        prompts = load(path, max_prompt_tokens=64, overlong="drop")
    assert [prompts[row].answer for row in range(len(prompts))] == ["1", "3"]
    assert prompts.num_dropped == 1
    assert "dropped 1 of 3 rows" in caplog.text
    with pytest.raises(DataError, match="all 3 prompts are longer"):
        load(path, max_prompt_tokens=8, overlong="drop")
    assert len(load(path, max_prompt_tokens=102)) == 3


def test_several_sources_in_several_formats(tmp_path: Path) -> None:
    make_tiny_data(tmp_path / "a.parquet", 2)
    write_rows(tmp_path / "b.jsonl", [tiny_row(7, data_source="b"), tiny_row(8, prompt="1" * 100)])
    write_folder(tmp_path / "c", [[tiny_row(9, data_source="c")]])
    sources = [{"path": str(tmp_path / name)} for name in ("a.parquet", "b.jsonl", "c")]
    config = DataConfig(sources=sources, max_prompt_tokens=64, overlong="drop", shuffle=False)
    prompts = load_train_prompts(config, TOKENIZER)
    assert [prompts[row].data_source for row in range(len(prompts))] == ["tiny", "tiny", "b", "c"]
    assert prompts.num_dropped == 1
    assert prompts.max_prompt_tokens == 9
    rows = prompts.rows_for_step(0, 6, 0, shuffle=False)
    assert sorted(prompts[row].answer for row in rows) == ["1", "10", "10", "2", "8", "8"]
    with pytest.raises(DataError, match=r"b\.jsonl, row 2: the prompt has 102 tokens"):
        load_train_prompts(config.replace(overlong="error"), TOKENIZER)


def test_checked_prompts_are_rendered_and_tokenized_when_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows in the same order, also of several sources or levels, and of one with a control token's name."""
    rows = [tiny_row(number) for number in range(4)] + [tiny_row(4, prompt="What is <|user|>?")]
    for number, row in enumerate(rows):
        row["extra_info"]["level"] = number % 2
    paths = [{"path": str(write_rows(tmp_path / f"{name}.jsonl", rows)), "weight": 2} for name in "ab"]
    levels = {"kind": "levels", "field": "level", "starts": [0, 1]}
    rendered, render = [], ChatTemplate.render

    def counted(chat: ChatTemplate, messages: Messages, **options: bool) -> str:
        rendered.append(messages)
        return render(chat, messages, **options)

    for data in (
        DataConfig(sources=paths),
        DataConfig(train_path=paths[0]["path"], curriculum=levels),
        DataConfig(train_path=paths[0]["path"], max_prompt_tokens=12, overlong="drop"),
    ):
        whole = load_train_prompts(data, TOKENIZER)
        with monkeypatch.context() as patch:
            patch.setattr(ChatTemplate, "render", counted)
            lazy = load_train_prompts(data, TOKENIZER, are_checked=True)
            assert bool(rendered) == (data.overlong == "drop")
        assert len(lazy) == len(whole)
        assert lazy.rows_for_step(1, 3, 0, shuffle=True).tolist() == whole.rows_for_step(1, 3, 0, shuffle=True).tolist()
        for ours, theirs in ((lazy[number], whole[number]) for number in range(len(whole))):
            assert ours.prompt_ids.tolist() == theirs.prompt_ids.tolist()
            assert ours.prompt_ids.dtype == theirs.prompt_ids.dtype
            assert replace(ours, prompt_ids=theirs.prompt_ids) == theirs
        assert lazy.max_prompt_tokens == whole.max_prompt_tokens


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "nothing to train on; set data.train_path"),
        ({"train_path": ""}, "nothing to train on"),
        ({"train_path": "a", "sources": [{"path": "b"}]}, "are both set; leave one out"),
        ({"sources": [{"path": "b", "weight": 0}]}, "greater than 0"),
        ({"sources": [{"path": "b", "weight": float("inf")}]}, "finite"),
    ],
)
def test_train_path_and_sources_exclude_each_other(fields: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DataConfig.model_validate(fields)


def test_an_empty_train_path_lets_sources_replace_it() -> None:
    config = DataConfig.model_validate({"train_path": "", "sources": [{"path": "b", "weight": 2}]})
    assert [(source.path, source.weight) for source in config.train_sources] == [("b", 2.0)]
    assert [source.path for source in DataConfig(train_path="a").train_sources] == ["a"]
