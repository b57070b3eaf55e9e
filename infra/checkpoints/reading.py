"""Load through torch.distributed.checkpoint: each rank reads the rows that it holds, whichever ranks wrote them."""

import json
import math
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from infra.checkpoints.shards import DTYPES, OFFSETS, SUFFIX, FileEntry, completed_future, read_spans, split_by_bytes
from infra.storage.folder import Folder
from schemas.errors import CheckpointError

READ_BYTES = 2**28  # fetched at once
_HEADER_LENGTH_BYTES, _HEADER_THREADS = 8, 16


@dataclass(frozen=True)
class _Stored:
    """The location of one part of a tensor."""

    file: str
    start: int  # byte offset in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    def span(self, item: ReadItem) -> tuple[int, int]:
        """Return the byte range of the rows that an item needs."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        if not self.shape:
            return self.start, self.start + row_bytes
        start = self.start + item.storage_offsets[0] * row_bytes
        return start, start + item.lengths[0] * row_bytes

    def part(self, item: ReadItem, rows: bytes | memoryview) -> Tensor:
        """Return the slice that an item needs, given its rows."""
        tensor = torch.frombuffer(bytearray(rows), dtype=self.dtype).view((*item.lengths[:1], *self.shape[1:]))
        for dim in range(1, len(self.shape)):
            tensor = tensor.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        return tensor


class ShardReader(StorageReader):
    """Reads this process's part of the tensors, whatever the number of ranks that wrote them.

    Args:
        folder: The folder of all checkpoints.
        name: The checkpoint's subfolder.
        files: The checkpoint's files, from its manifest.
    """

    def __init__(self, folder: Folder, name: str, files: dict[str, FileEntry]) -> None:
        self._folder, self._name, self._files = folder, name, files
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing: a reader is made for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the tensors' metadata from the files' headers, which are read once.

        Raises:
            CheckpointError: A file is missing, truncated, or not a safetensors file.
        """
        if self._metadata is None:
            self._metadata = self._read_headers()
        return self._metadata

    def _read_headers(self) -> Metadata:
        stored: dict[MetadataIndex, _Stored] = {}
        with ThreadPoolExecutor(_HEADER_THREADS) as threads:  # object stores take their time for each of many files
            shards = {file: entry for file, entry in self._files.items() if file.endswith(SUFFIX)}
            for parts in threads.map(self._parts, shards, shards.values()):
                stored |= parts
        chunks: dict[str, list[tuple[MetadataIndex, _Stored]]] = {}
        for index, part in stored.items():
            chunks.setdefault(index.fqn, []).append((index, part))
        return Metadata({name: _tensor_metadata(parts) for name, parts in chunks.items()}, storage_data=stored)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._stored: dict[MetadataIndex, _Stored] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            if math.prod(item.lengths):
                by_file.setdefault(self._stored[item.storage_index].file, []).append(item)
        for file, items in by_file.items():
            for batch in split_by_bytes(items, self._span_bytes, READ_BYTES):
                spans = [self._stored[item.storage_index].span(item) for item in batch]
                for item, rows in zip(batch, read_spans(self._folder, f"{self._name}/{file}", spans), strict=True):
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._stored[item.storage_index].part(item, rows))
                    planner.commit_tensor(item, target)
        return completed_future(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False  # never selected by id

    def _span_bytes(self, item: ReadItem) -> int:
        start, stop = self._stored[item.storage_index].span(item)
        return stop - start

    def _parts(self, file: str, entry: FileEntry) -> dict[MetadataIndex, _Stored]:
        path = f"{self._name}/{file}"
        if (size := self._folder.size(path)) != entry.num_bytes:
            raise CheckpointError(f"{self._folder}/{path} has {size or 0} bytes, expected {entry.num_bytes}")
        try:
            return _decode_header(file, *self._header(path))
        except OSError as error:
            raise CheckpointError(f"{self._folder}/{path} can't be read: {error}; try again") from error
        except (KeyError, ValueError, TypeError, struct.error) as error:
            raise CheckpointError(f"{self._folder}/{path} is not a shard of a checkpoint: {error!r}") from None

    def _header(self, path: str) -> tuple[dict[str, Any], int]:
        """Return a file's header, and the byte offset of its data."""
        [head] = read_spans(self._folder, path, [(0, _HEADER_LENGTH_BYTES)])
        stop = _HEADER_LENGTH_BYTES + int(struct.unpack("<Q", head)[0])
        [text] = read_spans(self._folder, path, [(_HEADER_LENGTH_BYTES, stop)])
        return json.loads(bytes(text)), stop


def _decode_header(file: str, header: dict[str, Any], data_start: int) -> dict[MetadataIndex, _Stored]:
    sharding = json.loads(header.pop("__metadata__")[OFFSETS])
    return {
        MetadataIndex(name, sharding[name]["saved_offsets"]): _Stored(
            file, data_start + fields["data_offsets"][0], DTYPES[fields["dtype"]], tuple(fields["shape"])
        )
        for name, fields in header.items()
    }


def _tensor_metadata(parts: list[tuple[MetadataIndex, _Stored]]) -> TensorStorageMetadata:
    """Return the metadata of a whole tensor, whose size is the farthest extent of its parts."""
    chunks = [ChunkStorageMetadata(torch.Size(index.offset or ()), torch.Size(part.shape)) for index, part in parts]
    ends = [[start + length for start, length in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
    size = torch.Size([max(stops) for stops in zip(*ends, strict=True)])
    return TensorStorageMetadata(TensorProperties(dtype=parts[0][1].dtype), size, chunks)
