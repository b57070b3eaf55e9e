"""The single-writer rule: a key is written once, and a second put under it must have the same content."""

import pyarrow as pa

from rl_core.columns.codec import encode
from schemas.batch import ChunkRef
from schemas.errors import DuplicateChunkError


def check_same_content(ref: ChunkRef, held: pa.RecordBatch, columns: pa.RecordBatch) -> ChunkRef:
    """Check that a put repeats what is stored under its key; return the stored chunk's reference.

    Equal columns may differ in bytes without meaning, such as padding and values under a null, so values are compared.

    Raises:
        DuplicateChunkError: The stored content differs.
    """
    if held.equals(columns) or encode(held).equals(encode(columns)):  # NaNs are equal only as bytes
        return ref
    raise DuplicateChunkError(
        f"chunk {ref.key} is already stored with other content: {_difference(held, columns)}; "
        "a chunk has one writer, and a retry must produce the same content"
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
            return f"column {name!r} first differs in row {row} of {len(now)}"
    return "bytes under nulls or NaNs"
