"""The bytes of one stored chunk, an Arrow IPC stream of one record batch, and the schema that it must keep.

Nothing here pickles, and decoding never trusts its input: any process may have written the bytes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rl_core.columns.jagged import row_lengths
from schemas.catalog import Axis, ColumnSpec, column_spec
from schemas.errors import ColumnError, StoreError

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def encode(columns: pa.RecordBatch) -> pa.Buffer:
    """Encode a record batch as an Arrow IPC stream; a sliced batch takes only its own rows' bytes."""
    plain = columns.replace_schema_metadata(None)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, plain.schema) as writer:
        writer.write_batch(plain)
    return sink.getvalue()


def decode(data: pa.Buffer | bytes) -> pa.RecordBatch:
    """Decode what `encode` wrote, without copying: the columns are views of `data`.

    Raises:
        StoreError: The bytes are not one whole, well-formed record batch.
    """
    buffer = pa.py_buffer(data)
    try:
        with pa.ipc.open_stream(buffer) as stream:
            batches = list(stream)
        if len(batches) == 1:
            batches[0].validate(full=True)  # offsets out of bounds would read foreign memory
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"{buffer.size} stored bytes are not an Arrow IPC stream, or are damaged: {error}") from error
    if len(batches) != 1:
        raise StoreError(f"{buffer.size} stored bytes hold {len(batches)} record batches, expected 1")
    if buffer.slice(max(buffer.size - len(_END_OF_STREAM), 0)).to_pybytes() != _END_OF_STREAM:
        raise StoreError(f"{buffer.size} stored bytes lack the end of an Arrow IPC stream: they are cut off")
    return batches[0]


def arrow_type(name: str, dtype: str) -> pa.DataType:
    """The exact Arrow type of column `name` with value type `dtype`: a large_list of it on a jagged axis.

    Raises:
        ColumnError: The catalogue has no such column, or not with this dtype.
    """
    spec = column_spec(name)
    if dtype not in spec.dtypes:
        raise ColumnError(f"column {name!r} is {dtype}, expected {' or '.join(spec.dtypes)}")
    value_type = pa.type_for_alias(dtype)
    return value_type if spec.axis == "row" else pa.large_list(value_type)


def value_dtypes(columns: pa.RecordBatch) -> dict[str, str]:
    """The dtypes of a valid record batch by column name, as handles state them."""
    return {
        field.name: str(field.type.value_type if pa.types.is_large_list(field.type) else field.type)
        for field in columns.schema
    }


def validate(columns: pa.RecordBatch, lengths: Mapping[Axis, npt.NDArray[Any]] | None = None) -> None:
    """Check that a record batch of N rows is as the catalogue declares: nothing is converted to fit.

    Args:
        columns: The columns to be stored.
        lengths: The row lengths, [N], that an axis must have, where they are known. In any case, the columns
            of one axis must agree with each other.

    Raises:
        ColumnError: An undeclared or repeated column, another dtype or axis than declared, a null where none
            may be, row lengths that disagree, or a malformed array.
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
        ColumnError: It has other rows; the message names the first one.
    """
    actual = row_lengths(column)
    if actual.size != expected.size:
        raise ColumnError(f"column {name!r} has {actual.size} rows, expected {expected.size}")
    different = np.flatnonzero(actual != expected)
    if different.size:
        row = int(different[0])
        raise ColumnError(
            f"column {name!r} has {actual[row]} values in row {row}, expected {expected[row]} "
            f"as on its axis; {different.size} of {actual.size} rows differ"
        )


def _check_type(spec: ColumnSpec, actual: pa.DataType) -> None:
    expected = [arrow_type(spec.name, dtype) for dtype in spec.dtypes]
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
    if spec.axis != "row" and (nulls := column.flatten().null_count):
        raise ColumnError(f"column {spec.name!r} has {nulls} null values inside its rows, expected none")
