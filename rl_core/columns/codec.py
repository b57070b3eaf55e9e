"""The encoding of one chunk, an Arrow IPC file of one record batch, and its validation against the catalog.

The bytes are the same in memory and on disk, where any Arrow tool can open them. Nothing here
pickles, and decoding never trusts its input, since any process may have written the bytes.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rl_core.columns.gather import Ints
from rl_core.columns.jagged import is_jagged, offsets, row_lengths
from schemas.catalog import Axis, ColumnSpec, column_spec
from schemas.errors import ColumnError, ColumnNotFoundError, StoreError

Compression = Literal["lz4", "zstd"]
Extent = tuple[int, int]  # of bytes: the first one, and the one after the last

_END_BYTES = 2**16  # at either end: hold the file's schema and footer, unless it has thousands of columns
_VECTOR = re.compile(r"(?P<dtype>\w+)\[(?P<size>[1-9]\d*)\]")


def encoded_bytes(columns: pa.RecordBatch) -> int:
    """Return the number of bytes that `write` writes."""
    counter = pa.MockOutputStream()
    write(columns, counter)
    return int(counter.size())


def write(columns: pa.RecordBatch, sink: pa.NativeFile, compression: Compression | None = None) -> None:
    """Write a record batch as an Arrow IPC file; a slice takes only the bytes of its own rows."""
    plain = columns.replace_schema_metadata(None)
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_file(sink, plain.schema, options=options) as writer:
        writer.write_batch(plain)


def encode(columns: pa.RecordBatch, compression: Compression | None = None) -> pa.Buffer:
    """Return the bytes that `write` writes."""
    sink = pa.BufferOutputStream()
    write(columns, sink, compression)
    return sink.getvalue()


def decode(data: pa.Buffer | bytes, names: Collection[str] | None = None) -> pa.RecordBatch:
    """Decode the output of `encode` without copying: the columns are views of `data`, unless it is compressed.

    Args:
        data: The stored bytes.
        names: The columns to decode; they are returned in stored order. None decodes all. Other columns are neither
            read nor checked.

    Raises:
        StoreError: The bytes are not exactly one record batch, or the offsets of a row point outside them.
        ColumnNotFoundError: A named column is missing.
    """
    buffer = pa.py_buffer(data)
    try:
        return _decode(buffer, names)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"{buffer.size} stored bytes are not an Arrow IPC file, or are damaged: {error}") from error


def row_extents(buffer: pa.Buffer, names: Collection[str], starts: Ints, stops: Ints) -> Iterator[list[Extent]]:
    """Yield what `decode` and a gather read of some columns' rows, so that nothing else need be loaded.

    The extents of each list tell where those of the next one are: they must be loaded before that is taken.

    Args:
        buffer: The output of `encode`, not compressed, of which nothing need be loaded yet.
        names: The columns; names that the chunk lacks are ignored.
        starts: The rows' ranges: their first rows, [P].
        stops: The rows after their last ones, [P].

    Raises:
        StoreError: The bytes are not an Arrow file.
    """
    yield [(0, min(_END_BYTES, buffer.size)), (max(0, buffer.size - _END_BYTES), buffer.size)]
    try:
        with pa.ipc.open_file(buffer) as file:
            columns = file.get_batch(0) if file.num_record_batches == 1 else None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"its bytes are not an Arrow file: {error}") from error
    if columns is None:
        return
    arrays = [columns.column(name) for name in columns.schema.names if name in names]
    # All validity bits and offsets, as all are checked.
    structure = [part for array in arrays for part in array.buffers()[: 1 + _has_offsets(array)] if part is not None]
    yield [(part.address - buffer.address, part.address - buffer.address + part.size) for part in structure]
    yield [extent for array in arrays for extent in _value_extents(array, buffer.address, starts, stops)]


def _value_extents(array: pa.Array, origin: int, starts: Ints, stops: Ints) -> Iterator[Extent]:
    """Yield the extents of rows' values, and of all of the values' validity bits."""
    if is_jagged(array):
        starts, stops = offsets(array)[starts], offsets(array)[stops]
    elif pa.types.is_string(array.type):
        bounds = np.frombuffer(array.buffers()[1], np.int32).astype(np.int64)
        starts, stops = bounds[starts], bounds[stops]
    values = array.values if is_jagged(array) else array
    validity, *_, data = values.buffers()
    if validity is not None:
        yield validity.address - origin, validity.address - origin + validity.size
    if data is None:
        return
    bits, first = 8 if pa.types.is_string(values.type) else value_bits(values.type), data.address - origin
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        yield first + start * bits // 8, first + -(-stop * bits // 8)


def _has_offsets(array: pa.Array) -> bool:
    return is_jagged(array) or pa.types.is_string(array.type)


def _decode(buffer: pa.Buffer, names: Collection[str] | None) -> pa.RecordBatch:
    with pa.ipc.open_file(buffer) as file:
        if file.num_record_batches != 1:
            raise StoreError(f"{buffer.size} stored bytes hold {file.num_record_batches} record batches, expected 1")
        columns = file.get_batch(0)
    if names is not None:  # not by Arrow's `included_fields`, which copies
        stored = columns.schema.names
        missing = [name for name in names if name not in stored]
        if missing:
            raise ColumnNotFoundError(f"no column {missing[0]!r} in the chunk; it has {', '.join(stored)}")
        columns = columns.select([name for name in stored if name in names])
    for name, column in zip(columns.schema.names, columns.columns, strict=True):
        column.validate()
        _check_offsets(name, column)
    return columns


def _check_offsets(name: str, column: pa.Array) -> None:
    """Check that no row points outside its column's memory. Strings were checked when put, and are not read here."""
    if pa.types.is_large_list(column.type):
        bounds, num_values = column.offsets.to_numpy(), len(column.values)
    elif pa.types.is_string(column.type) and len(column):
        _, starts, data = column.buffers()
        bounds = np.frombuffer(starts, np.int32)[column.offset : column.offset + len(column) + 1]
        num_values = data.size if data else 0
    else:
        return
    if bounds[0] < 0 or bounds[-1] > num_values or (np.diff(bounds) < 0).any():
        raise ValueError(f"row offsets of column {name!r} point outside its {num_values} values")


def arrow_type(name: str, dtype: str) -> pa.DataType:
    """Return the Arrow type of column `name` with value type `dtype`: `dtype`, or on a jagged axis a large_list of it.

    The dtype of a column of vectors has their size, e.g. `uint8[16]`: a fixed_size_list of 16.

    Raises:
        ColumnError: The catalog has no such column, or not with this dtype.
    """
    spec = column_spec(name)
    vector = _VECTOR.fullmatch(dtype) if spec.is_vector else None
    item = vector["dtype"] if vector else dtype
    if item not in spec.dtypes or spec.is_vector != (vector is not None):
        raise ColumnError(f"column {name!r} is {dtype}, expected {_expected_dtypes(spec)}")
    value_type = pa.type_for_alias(item)
    if vector:
        value_type = pa.list_(value_type, int(vector["size"]))
    return value_type if spec.axis == "row" else pa.large_list(value_type)


def value_dtypes(columns: pa.RecordBatch) -> dict[str, str]:
    """Return the dtypes of a valid record batch by column name, in the notation of handles."""
    return {field.name: _dtype(field.type) for field in columns.schema}


def value_bits(column_type: pa.DataType) -> int:
    """Return the bits of one value of a column that is not of strings; of one token's vector."""
    value_type = column_type.value_type if pa.types.is_large_list(column_type) else column_type
    if pa.types.is_fixed_size_list(value_type):
        return int(value_type.list_size * value_type.value_type.bit_width)
    return int(value_type.bit_width)


def _dtype(column_type: pa.DataType) -> str:
    value_type = column_type.value_type if pa.types.is_large_list(column_type) else column_type
    if pa.types.is_fixed_size_list(value_type):
        return f"{value_type.value_type}[{value_type.list_size}]"
    return str(value_type)


def _expected_dtypes(spec: ColumnSpec) -> str:
    return " or ".join(f"{dtype}[<values of a token>]" if spec.is_vector else dtype for dtype in spec.dtypes)


def validate(columns: pa.RecordBatch, lengths: Mapping[Axis, npt.NDArray[Any]] | None = None) -> None:
    """Check that a record batch of N rows matches the catalog; nothing is converted.

    Args:
        columns: The columns to store.
        lengths: The expected row lengths, [N], of each axis for which they are known. In any case, all columns of an
            axis must have the same row lengths.

    Raises:
        ColumnError: An undeclared or repeated column, another dtype or axis than declared, a null in a column that
            isn't nullable, row lengths that disagree, or a malformed array.
    """
    known = dict(lengths or {})
    names = columns.schema.names
    if not names:
        raise ColumnError("a chunk has no columns, expected at least one")
    if len(set(names)) != len(names):
        raise ColumnError(f"columns repeat: {', '.join(sorted({name for name in names if names.count(name) > 1}))}")
    for name, column in zip(names, columns.columns, strict=True):
        spec = column_spec(name)
        _check_type(spec, column.type)
        _check_values(spec, column)
        if spec.axis != "row":
            check_row_lengths(name, column, known.setdefault(spec.axis, row_lengths(column)))


def check_row_lengths(name: str, column: pa.LargeListArray, expected: npt.NDArray[Any]) -> None:
    """Check that a jagged column of N rows has the `expected` lengths, [N].

    Raises:
        ColumnError: The lengths differ; the message names the first such row.
    """
    actual = row_lengths(column)
    if actual.size != expected.size:
        raise ColumnError(f"column {name!r} has {actual.size} rows, expected {expected.size}")
    different = np.flatnonzero(actual != expected)
    if different.size:
        row = int(different[0])
        raise ColumnError(
            f"column {name!r} has {actual[row]} values in row {row}, expected {expected[row]} "
            f"like the other columns of its axis; {different.size} of {actual.size} rows differ"
        )


def _check_type(spec: ColumnSpec, actual: pa.DataType) -> None:
    vector = _VECTOR.fullmatch(_dtype(actual))
    size = f"[{vector['size'] if vector else 1}]" if spec.is_vector else ""
    expected = [arrow_type(spec.name, dtype + size) for dtype in spec.dtypes]
    if actual not in expected:
        raise ColumnError(
            f"column {spec.name!r} is {actual}, expected {' or '.join(map(str, expected))} "
            f"({spec.axis} axis); convert it where it is produced"
        )


def _check_values(spec: ColumnSpec, column: pa.Array) -> None:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise ColumnError(f"column {spec.name!r} is malformed: {error}") from error
    if column.null_count and not spec.nullable:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise ColumnError(f"column {spec.name!r} is null in row {row}, expected a value; {column.null_count} are null")
    values = column.flatten() if spec.axis != "row" else column
    inside = values.flatten() if spec.is_vector else values
    if spec.axis != "row" and (nulls := values.null_count + (inside.null_count if spec.is_vector else 0)):
        raise ColumnError(f"column {spec.name!r} has {nulls} null values inside its rows, expected none")
