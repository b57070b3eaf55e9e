"""Prompt files and datasets for the tests."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from infra.datasets import PromptDataset, PromptRow, load_prompts
from infra.models.tiny import make_tokenizer
from schemas.config.data import DataConfig

TOKENIZER = make_tokenizer()


def load(path: Path, **config: object) -> PromptDataset:
    return load_prompts(str(path), DataConfig(train_path=str(path), **config), TOKENIZER)


def dataset_of(size: int) -> PromptDataset:
    return PromptDataset([PromptRow(np.array([1], np.int32), "", "", {}, "")] * size)


def write_folder(folder: Path, shards: Sequence[list[dict]], **state: object) -> Path:
    """Write what `datasets.Dataset.save_to_disk` writes: Arrow streams and two JSON files; return the folder."""
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
