"""One rank's parts of tensors as a safetensors file, including each part's offsets within its tensor.

The header records the offsets as torch's `HuggingFaceStorageWriter` does. Equal tensors give equal bytes, which the
safetensors library doesn't guarantee, because it writes the header's metadata in random order.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import torch
import xxhash
from pydantic import NonNegativeInt
from torch import Tensor
from torch.futures import Future

from infra.storage.folder import Folder
from schemas.base import Frozen
from schemas.packed import PackedInts

SUFFIX = ".safetensors"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
OFFSETS = "DCP_SHARDING_INFO"  # torch's key for {tensor: {"saved_offsets": [...]}}
INDEX = "index.json"
LENGTH_BYTES = 8  # of a header's length, which is before the header

Item = TypeVar("Item")


class FileEntry(Frozen):
    """One file of a checkpoint."""

    num_bytes: NonNegativeInt
    checksum: str  # XXH3-64, hex


class Part(NamedTuple):
    """One part of a tensor: its dtype, its first byte in the file, its offsets within the tensor, its shape."""

    dtype: str
    start: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensor(Frozen):
    """A whole tensor of a checkpoint, with D dimensions, and its P parts."""

    dtype: str
    size: tuple[NonNegativeInt, ...]  # D
    parts: PackedInts  # [P, 2 + 2 D]: the file's number, the first byte in it, D offsets within the tensor, D sizes


class ShardIndex(Frozen):
    """Where all tensors of a checkpoint are: one file in place of the headers of all, which may be many."""

    tensors: dict[str, StoredTensor]

    @classmethod
    def of(cls, parts_by_file: Mapping[str, Mapping[str, Part]]) -> "ShardIndex":
        """Return the index of files, which are numbered in the order of their names."""
        first, rows, sizes = dict[str, Part](), dict[str, list[int]](), dict[str, list[int]]()
        for number, file in enumerate(sorted(parts_by_file)):
            for name, part in parts_by_file[file].items():
                first.setdefault(name, part)
                rows.setdefault(name, []).extend((number, part.start, *part.offsets, *part.shape))
                ends = [start + length for start, length in zip(part.offsets, part.shape, strict=True)]
                sizes[name] = list(map(max, sizes.get(name, ends), ends))
        tensors = {
            name: StoredTensor(dtype=part.dtype, size=tuple(sizes[name]), parts=PackedInts(rows[name]))
            for name, part in first.items()
        }
        return cls(tensors=tensors)


def encode_shard(tensors: dict[str, Tensor], offsets: dict[str, Sequence[int]]) -> tuple[pa.Buffer, dict[str, Part]]:
    """Encode a safetensors file, and return where its tensors are; equal tensors give equal bytes.

    Args:
        tensors: Parts of tensors, on the CPU, by name.
        offsets: The start of each part within its tensor, by name.
    """
    # Widest dtypes first, so that all tensors stay aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    sharding = {name: {"saved_offsets": list(offsets[name])} for name in names}
    header: dict[str, Any] = {"__metadata__": {OFFSETS: json.dumps(sharding), "DCP_VERSION": "1.0", "format": "pt"}}
    position = 0
    for name in names:
        tensor, start = tensors[name], position
        position += tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, position],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = torch.frombuffer(bytearray(struct.pack("<Q", len(text)) + text), dtype=torch.uint8)
    parts = [tensors[name].contiguous().reshape(-1).view(torch.uint8) for name in names]
    data = pa.py_buffer(torch.cat([head, *parts]).numpy())  # torch copies without blocking other threads
    return data, decode_header(text, LENGTH_BYTES + len(text))


def decode_header(text: bytes, start: int) -> dict[str, Part]:
    """Return the parts of tensors in a file, by name.

    Args:
        text: The file's header.
        start: The byte after it.

    Raises:
        KeyError, ValueError, TypeError: It is not such a header.
    """
    header = json.loads(text)
    sharding = json.loads(header.pop("__metadata__")[OFFSETS])
    if unknown := {fields["dtype"] for fields in header.values()} - DTYPES.keys():
        raise ValueError(f"dtypes {unknown}")
    return {
        name: Part(
            fields["dtype"],
            start + fields["data_offsets"][0],
            tuple(sharding[name]["saved_offsets"]),
            tuple(fields["shape"]),
        )
        for name, fields in header.items()
    }


def file_entry(data: bytes | pa.Buffer) -> FileEntry:
    """Return the manifest entry of a file with this content."""
    return FileEntry(num_bytes=len(data), checksum=xxhash.xxh3_64_hexdigest(data))


def read_spans(folder: Folder, path: str, spans: list[tuple[int, int]]) -> Sequence[bytes | memoryview]:
    """Read byte ranges of a file: memory-mapped if it is local, else in one request."""
    mapped = folder.map(path)
    if mapped is None:
        return folder.read_ranges(path, spans)
    return [memoryview(mapped)[start:stop] for start, stop in spans]


def split_by_bytes(items: Iterable[Item], num_bytes: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Yield consecutive items in batches of at most `limit` bytes; a larger item is a batch of its own."""
    batch: list[Item] = []
    total = 0
    for item in items:
        size = num_bytes(item)
        if batch and total + size > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def completed_future(value: Any) -> Future[Any]:
    """Return a future that is already completed with `value`."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future
