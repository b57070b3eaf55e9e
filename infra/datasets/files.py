"""Read prompt data: Parquet, JSONL, and the folders that `save_to_disk` of Hugging Face datasets writes."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import DataError

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows at `path` as plain Python values.

    Args:
        path: A `.parquet` file; a `.jsonl` or `.json` file with one object per line; or a folder that `save_to_disk`
            wrote, of one dataset or of one split of a `DatasetDict`.

    Raises:
        DataError: The path doesn't exist, can't be read, or lacks a column.
    """
    if Path(path).is_dir():
        return _read_folder(Path(path))
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file; check data.train_path, data.sources and data.eval_path")
    if Path(path).suffix in (".jsonl", ".json"):
        return _read_jsonl(path)
    if Path(path).suffix != ".parquet":
        raise DataError(
            f"{path}: unknown kind of data file; give a .parquet or .jsonl file, or a folder that save_to_disk wrote"
        )
    return _read_parquet(path)


def _read_parquet(path: str) -> Iterator[dict[str, Any]]:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} can't be read as Parquet: {_first_line(error)}") from error
    _require_columns(path, table.column_names)
    return (row for batch in table.to_batches() for row in batch.to_pylist())


def _read_jsonl(path: str) -> Iterator[dict[str, Any]]:
    # Not pyarrow's reader: it needs one schema for all rows, fills gaps with nulls, and doesn't name the bad line.
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    raise DataError(f"{path}, row {number}: the line is blank; remove it")
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(f"{path}, row {number}: expected a JSON object, found {type(row).__name__}")
                yield row
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, row {number}: not JSON: {error}; write one JSON object per line") from error
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path} can't be read as UTF-8 text: {error}") from error


def _read_folder(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dataset's shards, in the order of its `state.json`."""
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json").get("splits")
        names = ", ".join(f"{folder}/{split}" for split in splits) if isinstance(splits, list) else "its subfolders"
        raise DataError(f"{folder} is a DatasetDict with several splits; give one of them: {names}")
    if not (folder / "state.json").is_file():
        raise DataError(
            f"{folder} has neither state.json nor dataset_dict.json; give a folder that save_to_disk of Hugging Face "
            "datasets wrote, or a .parquet or .jsonl file"
        )
    shards = _shards(folder)
    for shard in shards:
        if not shard.is_file():
            raise DataError(f"{shard}, which {folder}/state.json lists, does not exist; copy the whole folder")
    return (row for shard in shards for row in _read_stream(shard))


def _shards(folder: Path) -> Sequence[Path]:
    state = _read_json(folder / "state.json")
    files, indices = state.get("_data_files"), state.get("_indices_data_files")
    if indices:  # early versions stored the selected row numbers separately from the shards
        raise DataError(
            f"{folder}/state.json lists selected rows in _indices_data_files; load and save the dataset again with a "
            "version of datasets that writes the selected rows themselves"
        )
    if not isinstance(files, list) or not all(isinstance(file, dict) and "filename" in file for file in files):
        raise DataError(f"{folder}/state.json: _data_files is {files!r:.80}; expected a list of {{'filename': ...}}")
    return [folder / str(file["filename"]) for file in files]


def _read_stream(shard: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one Arrow IPC stream, one batch at a time, from a memory map."""
    try:
        with pa.memory_map(str(shard)) as source, pa.ipc.open_stream(source) as stream:
            _require_columns(str(shard), stream.schema.names)
            for batch in stream:
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{shard} can't be read as an Arrow stream: {_first_line(error)}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise DataError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _require_columns(path: str, names: Sequence[str]) -> None:
    missing = [name for name in REQUIRED_COLUMNS if name not in names]
    if missing:
        raise DataError(
            f"{path}: no column {missing[0]!r}; it has {', '.join(names)} but needs {', '.join(REQUIRED_COLUMNS)}"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
