import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.datasets import PromptDataset, PromptRow, load_prompts
from infra.tiny_model import make_tokenizer
from schemas.config.data import DataConfig
from schemas.errors import DataError
from tests.tiny import make_tiny_data, tiny_row, write_rows

TOKENIZER = make_tokenizer()


def load(path: Path, **config: object) -> PromptDataset:
    return load_prompts(str(path), DataConfig(train_path=str(path), **config), TOKENIZER)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_rows_come_with_the_chat_template_applied(tmp_path: Path, name: str) -> None:
    prompts = load(make_tiny_data(tmp_path / name, 3))
    assert len(prompts) == 3
    row = prompts[2]
    assert TOKENIZER.decode(row.prompt_ids) == "<|user|>2 + 1 =<|assistant|>"
    assert row.prompt_ids.dtype == np.int32
    assert (row.prompt_text, row.answer, row.data_source) == ("2 + 1 =", "3", "tiny")
    assert row.info == {"index": 2, "split": "train", "data_source": "tiny"}


def test_several_messages_and_answers_that_are_not_text(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    row = tiny_row(0) | {"prompt": chat, "reward_model": {"ground_truth": [4, "four"]}, "extra_info": None}
    prompts = load(write_rows(tmp_path / "rows.jsonl", [row]))
    assert prompts[0].prompt_text == "Be brief.\n\n2 + 2?"
    assert prompts[0].answer == '[4, "four"]'
    assert prompts[0].info == {"data_source": "tiny"}


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        load(tmp_path / "none.parquet")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("rows.parquet", b"not parquet", "can't be read as Parquet"),
        ("rows.csv", b"a,b", "unknown kind"),
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


def test_a_parquet_file_without_a_column(tmp_path: Path) -> None:
    path = make_tiny_data(tmp_path / "rows.parquet", 2)
    pq.write_table(pq.read_table(path).drop_columns(["reward_model"]), path)
    with pytest.raises(DataError, match="no column 'reward_model'; it has data_source, prompt, extra_info"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [{"role": "user", "content": " \n"}]}, "the prompt is empty"),
        ({"prompt": None}, "column 'prompt' is missing or null"),
        ({"prompt": "2 + 2"}, "prompt is str; expected a chat list"),
        ({"prompt": [{"role": "user"}]}, "prompt[0] is {'role': 'user'}"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "expected text under role and content",
        ),
        ({"data_source": 3}, "data_source is 3"),
        ({"reward_model": {"style": "rule"}}, "reward_model.ground_truth is missing or null"),
        ({"reward_model": "4"}, "reward_model.ground_truth is missing or null"),
        ({"extra_info": "x"}, "extra_info is str"),
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


def dataset_of(size: int) -> PromptDataset:
    return PromptDataset([PromptRow(np.array([1], np.int32), "", "", {}, "")] * size)


@given(
    size=st.integers(1, 30),
    num_prompts=st.integers(1, 40),
    seed=st.integers(0, 2**40),
    num_steps=st.integers(1, 12),
)
def test_steps_are_windows_of_whole_epochs(size: int, num_prompts: int, seed: int, num_steps: int) -> None:
    prompts = dataset_of(size)
    steps = [prompts.rows_for_step(step, num_prompts, seed, shuffle=True) for step in range(num_steps)]
    taken = np.concatenate(steps)
    for epoch in range(len(taken) // size):
        assert sorted(taken[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert all(len(rows) == num_prompts for rows in steps)


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    prompts = dataset_of(50)
    first, again = (prompts.rows_for_step(0, 50, 7, shuffle=True) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, prompts.rows_for_step(1, 50, 7, shuffle=True))
    assert not np.array_equal(first, prompts.rows_for_step(0, 50, 8, shuffle=True))
    assert np.array_equal(first[25:], prompts.rows_for_step(1, 25, 7, shuffle=True))


def test_without_shuffling_steps_follow_the_file() -> None:
    assert dataset_of(5).rows_for_step(1, 3, 0, shuffle=False).tolist() == [3, 4, 0]
    assert dataset_of(5).rows_for_groups(1, range(2, 6), 3, 0, shuffle=False).tolist() == [0, 1, 2, 3]


@given(
    size=st.integers(1, 30),
    num_prompts=st.integers(1, 12),
    seed=st.integers(0, 2**40),
    step=st.integers(0, 9),
    groups=st.lists(st.integers(0, 60), unique=True).map(sorted),
    shuffle=st.booleans(),
)
def test_further_groups_take_rows_that_the_step_does_not_have(
    size: int, num_prompts: int, seed: int, step: int, groups: list[int], shuffle: bool
) -> None:
    prompts = dataset_of(size)
    rows = prompts.rows_for_groups(step, range(61), num_prompts, seed, shuffle)
    own = prompts.rows_for_step(step, num_prompts, seed, shuffle)
    assert np.array_equal(rows[:num_prompts], own)
    others = size - len(set(own))
    further = rows[num_prompts : num_prompts + others].tolist()
    assert set(further) <= set(range(size)) - set(own.tolist())
    assert len(set(further)) == len(further)
    # A row is a function of its group's number, not of what else is asked for.
    assert prompts.rows_for_groups(step, groups, num_prompts, seed, shuffle).tolist() == rows[groups].tolist()


def test_each_step_has_further_rows_of_its_own() -> None:
    prompts = dataset_of(50)
    further = [prompts.rows_for_groups(step, range(4, 24), 4, 7, shuffle=True) for step in (0, 1)]
    assert not np.array_equal(*further)
    assert not np.array_equal(further[0], prompts.rows_for_groups(0, range(4, 24), 4, 8, shuffle=True))
