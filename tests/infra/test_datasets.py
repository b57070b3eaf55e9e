import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.datasets import PromptDataset, PromptRow, load_prompts, load_train_prompts
from infra.models.tiny import make_tokenizer
from rl_core.rollout.seeding import derive_seed
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
    with pytest.raises(DataError, match="no such file"):
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
    with pytest.raises(DataError, match="no column 'reward_model'; it has data_source, prompt, extra_info but needs"):
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
            "expected strings for role and content",
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


def write_folder(folder: Path, shards: Sequence[list[dict]], **state: object) -> Path:
    """Write what `datasets.Dataset.save_to_disk` writes: Arrow streams, and two JSON files beside them."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    fields = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "5c5e1a9a0d1f2b3c",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(fields | state))
    (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "features": {}, "splits": {}}))
    return folder


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in (1, 0)]
    shards = [[tiny_row(0), tiny_row(1)], [tiny_row(2)]]
    prompts = load(write_folder(tmp_path / "rows", shards, _data_files=files))
    assert [prompts[row].answer for row in range(len(prompts))] == ["3", "1", "2"]  # state.json says the order
    assert prompts[0].info == {"index": 2, "split": "train", "data_source": "tiny"}


def test_a_row_of_a_folder_is_counted_over_its_shards(tmp_path: Path) -> None:
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


def test_a_folder_that_is_cut_short_or_lacks_a_column(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "rows", [[tiny_row(0), tiny_row(1)]])
    shard = folder / "data-00000-of-00001.arrow"
    shard.write_bytes(shard.read_bytes()[:-64])
    with pytest.raises(DataError, match="can't be read as an Arrow stream"):
        load(folder)
    bare = write_folder(tmp_path / "bare", [[{"prompt": [], "data_source": "tiny"}]])
    with pytest.raises(DataError, match="no column 'reward_model'; it has prompt, data_source"):
        load(bare)


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
def test_one_file_or_several(fields: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DataConfig.model_validate(fields)


def test_a_config_can_be_told_to_take_several_instead_of_one() -> None:
    config = DataConfig.model_validate({"train_path": "", "sources": [{"path": "b", "weight": 2}]})
    assert [(source.path, source.weight) for source in config.train_sources] == [("b", 2.0)]
    assert [source.path for source in DataConfig(train_path="a").train_sources] == ["a"]


def mix_of(sizes: Sequence[int], weights: Sequence[float]) -> PromptDataset:
    return PromptDataset.mix([dataset_of(size) for size in sizes], weights)


def sources_of(rows: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    return np.searchsorted(np.cumsum(sizes), rows, side="right")


def test_shares_by_hand() -> None:
    # floor(3 n / 4) grows at n = 1, 2, 3, 5, 6, 7, ...: those are the first source's, rows 0 and 1.
    mixed = mix_of([2, 3], [0.3, 0.1])
    assert mixed.rows_for_step(0, 4, 0, shuffle=False).tolist() == [2, 0, 1, 0]
    assert mixed.rows_for_step(1, 4, 0, shuffle=False).tolist() == [3, 1, 0, 1]
    assert mixed.rows_for_step(1, 2, 0, shuffle=False).tolist() == [1, 0]
    assert mixed.rows_for_groups(1, range(6), 4, 0, shuffle=False).tolist() == [3, 1, 0, 1, 4, 0]


SOURCE = st.tuples(st.integers(1, 12), st.floats(0.01, 100).map(lambda weight: round(weight, 3)))
SOURCES = st.lists(SOURCE, min_size=1, max_size=5)  # sizes and weights


@given(
    sources=SOURCES,
    num_prompts=st.integers(1, 20),
    first=st.integers(0, 1000),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
def test_shares_follow_the_weights_in_every_window(
    sources: list, num_prompts: int, first: int, seed: int, shuffle: bool
) -> None:
    sizes, weights = zip(*sources, strict=True)
    mixed = mix_of(sizes, weights)
    steps = [mixed.rows_for_step(step, num_prompts, seed, shuffle) for step in range(first, first + 8)]
    taken = sources_of(np.concatenate(steps), sizes)
    for source, weight in enumerate(weights):
        expected = len(taken) * weight / sum(weights)
        assert abs((taken == source).sum() - expected) < len(sizes) + 1e-6


@given(sources=SOURCES, seed=st.integers(0, 2**40))
def test_each_source_has_whole_epochs_of_its_own(sources: list, seed: int) -> None:
    sizes, weights = zip(*sources, strict=True)
    mixed = mix_of(sizes, weights)
    rows = np.concatenate([mixed.rows_for_step(step, 10, seed, shuffle=True) for step in range(12)])
    for source, size in enumerate(sizes):
        mine = rows[sources_of(rows, sizes) == source] - sum(sizes[:source])
        for epoch in range(len(mine) // size):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(
    sources=SOURCES,
    num_prompts=st.integers(1, 8),
    step=st.integers(0, 9),
    seed=st.integers(0, 2**40),
    groups=st.lists(st.integers(0, 40), unique=True).map(sorted),
    shuffle=st.booleans(),
)
def test_further_groups_of_several_sources(
    sources: list, num_prompts: int, step: int, seed: int, groups: list[int], shuffle: bool
) -> None:
    sizes, weights = zip(*sources, strict=True)
    mixed = mix_of(sizes, weights)
    rows = mixed.rows_for_groups(step, range(41), num_prompts, seed, shuffle)
    assert np.array_equal(rows[:num_prompts], mixed.rows_for_step(step, num_prompts, seed, shuffle))
    assert mixed.rows_for_groups(step, groups, num_prompts, seed, shuffle).tolist() == rows[groups].tolist()
    taken = sources_of(rows, sizes)
    for source, size in enumerate(sizes):
        own = set(rows[:num_prompts][taken[:num_prompts] == source].tolist())
        further = rows[num_prompts:][taken[num_prompts:] == source].tolist()[: size - len(own)]
        assert not own & set(further)
        assert len(set(further)) == len(further)
    # The sources alternate as they would in a longer step.
    longer = mix_of(sizes, weights).rows_for_step(0, num_prompts * step + 41, seed, shuffle)
    assert np.array_equal(taken, sources_of(longer, sizes)[num_prompts * step :])


@given(
    size=st.integers(1, 20),
    num_prompts=st.integers(1, 12),
    step=st.integers(0, 9),
    seed=st.integers(0, 2**40),
    weight=st.sampled_from([0.1, 1.0, 7.0]),
)
def test_one_source_has_the_order_of_one_file(size: int, num_prompts: int, step: int, seed: int, weight: float) -> None:
    def permutation(seed: object) -> np.ndarray:
        return np.random.Generator(np.random.PCG64(seed)).permutation(size)  # type: ignore[arg-type]

    first, last = step * num_prompts, (step + 1) * num_prompts
    epochs = np.concatenate([permutation([seed, epoch]) for epoch in range(last // size + 1)])
    own = epochs[first:last]
    orders = [permutation(derive_seed(seed, "further", step, epoch)) for epoch in range(30 // size + 1)]
    further = [row for order in orders for row in sorted(order, key=lambda row: row in own)]
    rows = mix_of([size], [weight]).rows_for_groups(step, range(num_prompts + 30), num_prompts, seed, shuffle=True)
    assert rows.tolist() == [*own, *further[:30]]


def test_sources_of_one_size_are_in_different_orders() -> None:
    mixed = mix_of([50, 50], [1, 1])
    rows = mixed.rows_for_step(0, 100, 7, shuffle=True)
    assert not np.array_equal(rows[rows < 50], rows[rows >= 50] - 50)
    assert (rows[0::2] >= 50).all()
