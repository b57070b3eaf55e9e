"""The forms in which users have prompt data: kinds of files, of chats, and of Arrow values."""

import datetime
import decimal
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.errors import DataError
from tests.support.dataset_rows import load
from tests.support.tiny import make_tiny_data, tiny_row, write_rows

QUESTION = [{"role": "user", "content": "2 + 2?"}]


def answers(path: Path) -> list[str]:
    prompts = load(path)
    return [prompts[row].answer for row in range(len(prompts))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", lambda rows: "\ufeff" + "\n".join(map(json.dumps, rows))),
        ("rows.json", lambda rows: "\n".join(map(json.dumps, rows))),
        ("rows.json", lambda rows: json.dumps(rows, indent=1)),
        ("rows.json", lambda rows: "\ufeff" + json.dumps(rows)),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_text_files(tmp_path: Path, name: str, content, ending: str) -> None:
    data = content([tiny_row(0), tiny_row(1)]).encode()
    path = tmp_path / (name + ending)
    path.write_bytes(gzip.compress(data) if ending else data)
    assert answers(path) == ["1", "2"]


def test_csv_has_json_in_its_cells(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        'data_source,prompt,reward_model,extra_info\nsums,"2 + 2, or\nmore?","{""ground_truth"": ""4""}",\n'
        'sums,"[{""role"": ""user"", ""content"": ""3?""}]","{""ground_truth"": 3}","{""level"": 1}"\n'
    )
    prompts = load(path)
    assert [prompts[row].messages[0]["content"] for row in (0, 1)] == ["2 + 2, or\nmore?", "3?"]
    assert answers(path) == ["4", "3"]
    assert prompts[1].info == {"level": 1, "data_source": "sums"}
    for line, text in (("sums,a,b,c,d", "row 3: it has more or fewer cells"), ('sums,"a', "not CSV")):
        path.write_text(path.read_text().rsplit("\nsums,a,b,c,d\n")[0] + f"\n{line}\n")
        with pytest.raises(DataError, match=text):
            load(path)


def test_a_long_cell_of_a_csv_file(tmp_path: Path) -> None:
    path, text = tmp_path / "rows.csv", "x" * 200_000
    path.write_text(f'data_source,prompt,reward_model\nsums,{text},"{{""ground_truth"": ""4""}}"\n')
    prompts = load(path, max_prompt_tokens=300_000)
    assert prompts[0].prompt_text == text


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('data_source,prompt,prompt,reward_model\nsums,a,b,"{""ground_truth"": ""4""}"\n')
    with pytest.raises(DataError, match="2 columns are named 'prompt'; rename or remove all but one"):
        load(path)


def test_shards_in_a_folder_and_by_a_pattern(tmp_path: Path) -> None:
    for number in (1, 0):
        make_tiny_data(tmp_path / f"train-0000{number}-of-00002.parquet", 2 - number)
    (tmp_path / "README.md").write_text("about the data")
    assert answers(tmp_path) == ["1", "2", "1"]
    make_tiny_data(tmp_path / "test-00000-of-00001.parquet", 1)
    assert answers(tmp_path / "train-*.parquet") == ["1", "2", "1"]
    with pytest.raises(DataError, match=rf"several names; .*{tmp_path}/test\*.parquet, {tmp_path}/train\*.parquet"):
        load(tmp_path)
    (tmp_path / "test-00000-of-00001.parquet").unlink()
    (tmp_path / "train-00000-of-00002.parquet").unlink()
    with pytest.raises(DataError, match="lacks shard 0 of 2"):
        load(tmp_path)
    with pytest.raises(DataError, match="no file matches this pattern"):
        load(tmp_path / "validation-*.parquet")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("deepmath-train.jsonl", "deepmath-test.jsonl"),
        ("gsm8k_train.jsonl", "gsm8k_test.jsonl"),
        ("a.train-00000-of-00001.jsonl", "a.validation-00000-of-00001.jsonl"),
        ("2024_Train.jsonl", "2024_Dev.jsonl"),
        ("math500.jsonl", "math500-test.jsonl"),
    ],
)
def test_splits_of_a_data_set_in_one_folder_are_refused(tmp_path: Path, train: str, test: str) -> None:
    make_tiny_data(tmp_path / train, 2)
    assert answers(tmp_path) == ["1", "2"]
    make_tiny_data(tmp_path / test, 1)
    with pytest.raises(DataError, match=f"several splits, such as {train} and {test}"):
        load(tmp_path)


def test_other_words_in_the_names_of_files_are_no_splits(tmp_path: Path) -> None:
    for name in ("code-gen.jsonl", "code-eval.jsonl"):
        make_tiny_data(tmp_path / name, 1)
    assert answers(tmp_path) == ["1", "1"]


def test_shards_whose_names_have_numbers_and_hashes_are_of_one_split(tmp_path: Path) -> None:
    make_tiny_data(tmp_path / "gsm8k_train-0-0f3ade.jsonl", 2)
    make_tiny_data(tmp_path / "gsm8k_train-1-c0ffee.jsonl", 1)
    assert answers(tmp_path) == ["1", "2", "1"]


def test_a_folder_of_folders(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    make_tiny_data(tmp_path / "data" / "train.jsonl", 1)
    with pytest.raises(DataError, match=f"give one of its subfolders: {tmp_path}/data"):
        load(tmp_path)


@pytest.mark.parametrize(
    "prompt",
    [
        "2 + 2?",
        json.dumps(QUESTION),
        json.dumps(QUESTION, indent=1),
        f" [ {json.dumps(QUESTION[0])} ]\n",
        json.dumps(QUESTION[0]),
        QUESTION[0],
        [{"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]}],
        [{"from": "human", "value": "2 + 2?"}],
        [{"role": "user", "content": "2 + 2?", "name": None, "tool_calls": []}],
    ],
)
def test_chats(tmp_path: Path, prompt: object) -> None:
    (row,) = [load(write_rows(tmp_path / "rows.jsonl", [tiny_row(0) | {"prompt": prompt}]))[0]]
    assert row.messages == QUESTION
    assert row.prompt_text == "2 + 2?"


def test_a_text_that_only_looks_like_a_chat_is_a_text(tmp_path: Path) -> None:
    texts = ['[{"a": 1}] has which length?', '[{"a": 1}]', "[1, 2]", "{'role': 'x'} has which type?", "{'a': 1}", "[]"]
    prompts = load(write_rows(tmp_path / "rows.jsonl", [tiny_row(0) | {"prompt": text} for text in texts]))
    assert [prompts[row].prompt_text for row in range(len(texts))] == texts


def test_objects_as_json_text(tmp_path: Path) -> None:
    row = tiny_row(0) | {"reward_model": '{"ground_truth": [1]}', "extra_info": '{"level": 2}'}
    found = load(write_rows(tmp_path / "rows.jsonl", [row]))[0]
    assert (found.answer, found.info) == ("[1]", {"level": 2, "data_source": "tiny"})


def parquet(folder: Path, answer: pa.Array) -> Path:
    columns = {
        "data_source": ["tiny"] * len(answer),
        "prompt": [QUESTION] * len(answer),
        "reward_model": pa.StructArray.from_arrays([answer], ["ground_truth"]),
        "extra_info": pa.StructArray.from_arrays([answer], ["value"]),
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        (pa.array([decimal.Decimal("1.50")]), ["1.50"]),
        (pa.array([datetime.date(2024, 1, 2)]), ["2024-01-02"]),
        (pa.array([datetime.datetime(2024, 1, 2, 3)], pa.timestamp("us")), ["2024-01-02T03:00:00"]),
        (pa.array([datetime.datetime(2024, 1, 2, 3)], pa.timestamp("ns", "UTC")), ["2024-01-02T03:00:00+00:00"]),
        (pa.array([datetime.time(1, 2)]), ["01:02:00"]),
        (pa.array([b"42"]), ["42"]),
        (pa.array([b"42"], pa.binary_view()), ["42"]),
        (pa.array([b"42"], pa.large_binary()), ["42"]),
        (pa.array(["42"], pa.string_view()), ["42"]),
        (pa.array([0.1, 16777216.0], pa.float32()), ["0.1", "16777216.0"]),
        (pa.array(np.array([0.1], np.float16)), ["0.1"]),
        (pa.array([0.1]), ["0.1"]),
        (pa.array(["7", "x"]).dictionary_encode(), ["7", "x"]),
        (pa.array([[decimal.Decimal("0.5")]]), ['["0.5"]']),
        (pa.array([[("a", 0.1)]], pa.map_(pa.string(), pa.float32())), ['{"a": 0.1}']),
    ],
)
def test_values_of_parquet_are_those_of_json(tmp_path: Path, answer: pa.Array, texts: list[str]) -> None:
    path = parquet(tmp_path, answer)
    assert answers(path) == texts
    for row, text in enumerate(texts):
        value = load(path)[row].info["value"]
        assert (value if isinstance(value, str) else json.dumps(value)) == text


def test_the_json_type_of_datasets(tmp_path: Path) -> None:
    values = pa.array(["42", '"x+1"', "7", '{"a": [1]}'], pa.string())
    answer = pa.ExtensionArray.from_storage(pa.json_(), values)
    path = parquet(tmp_path, answer)
    assert answers(path) == ["42", "x+1", "7", '{"a": [1]}']
    assert load(path)[3].info["value"] == {"a": [1]}


def test_binary_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.parquet, row 2: reward_model has a value that is neither text nor JSON"):
        load(parquet(tmp_path, pa.array([b"42", b"\xff"])))


def test_nulls_in_columns_of_other_trainers(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([tiny_row(0) | {"images": None}, tiny_row(1) | {"images": [{"bytes": b"\xff"}]}])
    pq.write_table(table.slice(0, 1), tmp_path / "rows.parquet")
    assert answers(tmp_path / "rows.parquet") == ["1"]
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="row 2: the column 'images' can't be part of the prompt: prompts are text"):
        load(tmp_path / "rows.parquet")
