"""Read rows of Arrow: Parquet files, and the streams that `save_to_disk` of Hugging Face datasets writes."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infra.datasets.arrow_values import value_decoder
from infra.datasets.columns import UNSUPPORTED_COLUMNS, known_columns
from schemas.errors import DataError


def read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as JSON values, one batch at a time.

    Raises:
        DataError: It can't be read, or lacks a column; or a value is none of JSON, in which row and column.
    """
    try:
        with pq.ParquetFile(file, arrow_extensions_enabled=True) as source:
            columns = known_columns(str(file), source.schema_arrow.names)
            yield from _rows(file, source.iter_batches(columns=columns))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} can't be read as Parquet: {_first_line(error)}") from error


def read_stream(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow IPC stream as JSON values, one batch at a time, from a memory map.

    Raises:
        DataError: See `read_parquet`.
    """
    try:
        with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
            columns = known_columns(str(file), stream.schema.names)
            yield from _rows(file, (batch.select(columns) for batch in stream))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} can't be read as an Arrow stream: {_first_line(error)}") from error


def saved_shards(folder: Path) -> list[Path]:
    """Return the streams of a dataset that `save_to_disk` wrote, in the order of its `state.json`.

    Raises:
        DataError: The folder has several datasets, or is damaged.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _read_object(folder / "dataset_dict.json").get("splits")
        names = ", ".join(f"{folder}/{split}" for split in splits) if isinstance(splits, list) else "its subfolders"
        raise DataError(f"{folder} is a DatasetDict with several splits; give one of them: {names}")
    state = _read_object(folder / "state.json")
    files, indices = state.get("_data_files"), state.get("_indices_data_files")
    if indices:  # early versions stored the selected row numbers separately from the shards
        raise DataError(
            f"{folder}/state.json lists selected rows in _indices_data_files; load and save the dataset again with a "
            "version of datasets that writes the selected rows themselves"
        )
    if not isinstance(files, list) or not all(isinstance(file, dict) and "filename" in file for file in files):
        raise DataError(f"{folder}/state.json: _data_files is {files!r:.80}; expected a list of {{'filename': ...}}")
    shards = [folder / str(file["filename"]) for file in files]
    for shard in shards:
        if not shard.is_file():
            raise DataError(f"{shard}, which {folder}/state.json lists, does not exist; copy the whole folder")
    return shards


def _rows(file: Path, batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    number = 0
    for batch in batches:
        fields = {field.name: field.type for field in batch.schema if field.name not in UNSUPPORTED_COLUMNS}
        decoders = {name: decode for name, type_ in fields.items() if (decode := value_decoder(type_)) is not None}
        for row in batch.to_pylist():
            number += 1
            for name, decode in decoders.items():
                try:
                    row[name] = decode(row[name])
                except ValueError as error:
                    raise DataError(
                        f"{file}, row {number}: {name} has a value that is neither text nor JSON: {error}; convert it "
                        "to text, or remove it"
                    ) from error
            yield row


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise DataError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
