"""Read rows of Arrow: Parquet files, and the streams that `save_to_disk` of Hugging Face datasets writes.

Values are as JSON has them: what a JSONL file with the same rows would give.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infra.datasets.columns import UNSUPPORTED_COLUMNS, ColumnChoice
from schemas.errors import DataError, first_line

Decoder = Callable[[Any], Any]

_BINARY = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)


def value_decoder(type_: pa.DataType) -> Decoder | None:
    """Return what makes a JSON value of a value that `to_pylist` gives for an Arrow type; None: it is one already.

    Decimals, dates, times and binary become text, float16 and float32 the shortest number of their own type, and the
    extension type `arrow.json`, the `Json` of Hugging Face datasets, what its text says.

    Raises:
        ValueError: By the decoder; binary isn't UTF-8, or a JSON text is none.
    """
    decode = _decoder_within(type_)
    return None if decode is None else lambda value: None if value is None else decode(value)


def _decoder_within(type_: pa.DataType) -> Decoder | None:
    if isinstance(type_, pa.BaseExtensionType):
        own: dict[str, Decoder] = {"arrow.json": json.loads, "arrow.uuid": str}
        return own.get(type_.extension_name) or _decoder_within(type_.storage_type)
    if pa.types.is_struct(type_):
        return _struct_decoder(type_)
    if pa.types.is_map(type_):
        of_value = value_decoder(type_.item_type) or _unchanged
        return lambda pairs: {str(key): of_value(value) for key, value in pairs}
    if pa.types.is_dictionary(type_):
        return _decoder_within(type_.value_type)
    if pa.types.is_nested(type_) and hasattr(type_, "value_type"):  # the kinds of lists
        of_item = value_decoder(type_.value_type)
        return of_item and (lambda items: [of_item(item) for item in items])
    return _scalar_decoder(type_)


def _struct_decoder(type_: pa.StructType) -> Decoder | None:
    of_field = {field.name: decode for field in type_ if (decode := value_decoder(field.type)) is not None}
    if not of_field:
        return None
    return lambda row: {name: of_field.get(name, _unchanged)(value) for name, value in row.items()}


def _scalar_decoder(type_: pa.DataType) -> Decoder | None:
    if pa.types.is_float16(type_):
        return lambda value: float(str(np.float16(value)))
    if pa.types.is_float32(type_):
        return lambda value: float(str(np.float32(value)))
    if pa.types.is_decimal(type_) or pa.types.is_duration(type_) or pa.types.is_interval(type_):
        return str
    if pa.types.is_date(type_) or pa.types.is_time(type_) or pa.types.is_timestamp(type_):
        return lambda value: value.isoformat()
    if any(is_one(type_) for is_one in _BINARY):
        return lambda value: value.decode()
    return None


def _unchanged(value: Any) -> Any:
    return value


def read_parquet(file: Path, choose: ColumnChoice) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as JSON values, one batch at a time.

    Raises:
        DataError: It can't be read, or lacks a column; or a value is none of JSON, in which row and column.
    """
    try:
        with pq.ParquetFile(file, arrow_extensions_enabled=True) as source:
            columns = choose(str(file), source.schema_arrow.names)
            yield from _rows(file, source.iter_batches(columns=columns))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} can't be read as Parquet: {first_line(error)}") from error


def read_stream(file: Path, choose: ColumnChoice) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow IPC stream as JSON values, one batch at a time, from a memory map.

    Raises:
        DataError: See `read_parquet`.
    """
    try:
        with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
            columns = choose(str(file), stream.schema.names)
            yield from _rows(file, (batch.select(columns) for batch in stream))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} can't be read as an Arrow stream: {first_line(error)}") from error


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
