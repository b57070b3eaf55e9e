"""The single-writer fence: a key is written once; a second put of it must be the same again."""

import pyarrow as pa

from rl_core.columns.codec import encode
from schemas.batch import ChunkRef
from schemas.errors import DuplicateChunkError


def same_content(ref: ChunkRef, held: pa.RecordBatch, columns: pa.RecordBatch) -> ChunkRef:
    """The reference of a chunk that is held already.

    Equal columns may differ in bytes that nobody reads, padding or what lies under a null, so values are compared.

    Raises:
        DuplicateChunkError: What is held is not what is to be put.
    """
    if held.equals(columns) or encode(held).equals(encode(columns)):  # NaN equals itself in bytes only
        return ref
    raise DuplicateChunkError(
        f"chunk {ref.key} is already held with other content: {_difference(held, columns)}; "
        "a chunk has one writer, and a retry must produce the same"
    )


def _difference(held: pa.RecordBatch, columns: pa.RecordBatch) -> str:
    if held.schema.names != columns.schema.names:
        return f"columns {', '.join(held.schema.names)}, now {', '.join(columns.schema.names)}"
    if held.num_rows != columns.num_rows:
        return f"{held.num_rows} rows, now {columns.num_rows}"
    for name in held.schema.names:
        before, now = held.column(name), columns.column(name)
        if before.type != now.type:
            return f"column {name!r} is {before.type}, now {now.type}"
        row = next((row for row in range(len(now)) if not before.slice(row, 1).equals(now.slice(row, 1))), None)
        if row is not None:
            return f"column {name!r} differs first in row {row} of {len(now)}"
    return "what lies under its nulls and NaNs"
