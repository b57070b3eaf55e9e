"""Folders that `save_to_disk` of Hugging Face datasets writes."""

from pathlib import Path

import pytest

from schemas.errors import DataError
from tests.support.dataset_rows import load, write_folder
from tests.support.tiny import tiny_row


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in (1, 0)]
    shards = [[tiny_row(0), tiny_row(1)], [tiny_row(2)]]
    prompts = load(write_folder(tmp_path / "rows", shards, _data_files=files))
    assert [prompts[row].answer for row in range(len(prompts))] == ["3", "1", "2"]  # in the order of state.json
    assert prompts[0].info == {"index": 2, "split": "train", "data_source": "tiny"}


def test_rows_are_numbered_across_shards(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "rows", [[tiny_row(0), tiny_row(1)], [tiny_row(2, prompt=" ")]])
    with pytest.raises(DataError, match=f"{folder}, row 3: the prompt is empty"):
        load(folder)


def test_a_folder_with_splits(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "test")):
        write_folder(tmp_path / "rows" / split, [[tiny_row(number)]], _split=split)
    (tmp_path / "rows" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert load(tmp_path / "rows" / "test")[0].answer == "2"
    with pytest.raises(DataError, match=f"give one of them: {tmp_path}/rows/train, {tmp_path}/rows/test"):
        load(tmp_path / "rows")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("state.json", None, "has neither state.json nor dataset_dict.json"),
        ("state.json", "{", "state.json can't be read as JSON"),
        ("state.json", "[]", "state.json: expected a JSON object, found list"),
        ("state.json", '{"_data_files": null}', "state.json: _data_files is None"),
        (
            "state.json",
            '{"_data_files": [{"filename": "x"}], "_indices_data_files": [{"filename": "indices.arrow"}]}',
            "load and save the dataset again",
        ),
        ("data-00000-of-00001.arrow", None, "data-00000-of-00001.arrow, which "),
        ("data-00000-of-00001.arrow", "", "data-00000-of-00001.arrow can't be read as an Arrow stream"),
        ("data-00000-of-00001.arrow", "not arrow", "data-00000-of-00001.arrow can't be read as an Arrow stream"),
    ],
)
def test_unusable_folders(tmp_path: Path, name: str, content: str | None, text: str) -> None:
    folder = write_folder(tmp_path / "rows", [[tiny_row(0)]])
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(DataError) as caught:
        load(folder)
    assert text in str(caught.value)
    assert str(caught.value).startswith(str(folder))


def test_a_folder_that_is_truncated_or_lacks_a_column(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "rows", [[tiny_row(0), tiny_row(1)]])
    shard = folder / "data-00000-of-00001.arrow"
    shard.write_bytes(shard.read_bytes()[:-64])
    with pytest.raises(DataError, match="can't be read as an Arrow stream"):
        load(folder)
    bare = write_folder(tmp_path / "bare", [[{"prompt": [], "data_source": "tiny"}]])
    with pytest.raises(DataError, match="no column 'reward_model'; it has prompt, data_source"):
        load(bare)
