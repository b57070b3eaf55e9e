"""Load through torch.distributed.checkpoint: each rank reads the rows that it holds, whichever ranks wrote them."""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from infra.checkpoints.shards import (
    DTYPES,
    LENGTH_BYTES,
    SUFFIX,
    Part,
    ShardIndex,
    StoredTensor,
    completed_future,
    decode_header,
    read_spans,
    split_by_bytes,
)
from infra.storage.folder import Folder
from schemas.errors import CheckpointError

READ_BYTES, RANGE_BYTES = 2**28, 2**26  # fetched at once, and by one request of these
_HEADER_THREADS = 16


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
        files: The names of the checkpoint's files, from its manifest.
        index: Where its tensors are.
        tensors: The tensors to read, all of them in the index; of a DTensor, this process's part.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        files: Iterable[str],
        index: ShardIndex,
        tensors: Mapping[str, Tensor],
    ) -> None:
        self._folder, self._name, self._files = folder, name, sorted(filter(is_shard, files))
        self._index, self._tensors = index, tensors

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing: a reader is made for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the tensors, without the parts of which this process holds nothing."""
        tensors, stored = dict[str, STORAGE_TYPES](), dict[MetadataIndex, _Stored]()
        for item in create_default_local_save_plan(dict(self._tensors), False).items:
            name, box = item.index.fqn, item.tensor_data.chunk if item.tensor_data else None
            assert box is not None, "only tensors are read"
            whole, chunks = self._index.tensors[name], []
            dtype, size = DTYPES[whole.dtype], torch.Size(whole.size)
            for file, start, *extent in parts_within(whole, box.offsets, box.sizes):
                offsets, shape = torch.Size(extent[: len(size)]), torch.Size(extent[len(size) :])
                stored[MetadataIndex(name, offsets)] = _Stored(self._files[file], start, dtype, shape)
                chunks.append(ChunkStorageMetadata(offsets, shape))
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
        return Metadata(tensors, storage_data=stored)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._stored: dict[MetadataIndex, _Stored] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in sorted(plan.items, key=self._span):
            if math.prod(item.lengths):
                by_file.setdefault(self._stored[item.storage_index].file, []).append(item)
        for file, items in by_file.items():
            path = f"{self._name}/{file}"
            for batch in split_by_bytes(items, self._span_bytes, READ_BYTES):
                for item, rows in zip(batch, _read_merged(self._folder, path, map(self._span, batch)), strict=True):
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._stored[item.storage_index].part(item, rows))
                    planner.commit_tensor(item, target)
        return completed_future(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False  # never selected by id

    def _span(self, item: ReadItem) -> tuple[int, int]:
        return self._stored[item.storage_index].span(item)

    def _span_bytes(self, item: ReadItem) -> int:
        start, stop = self._span(item)
        return stop - start


def parts_within(tensor: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Return the parts of a tensor, as in its index, that overlap a box."""
    start, dims = np.array(offsets, dtype=np.int64), len(tensor.size)
    parts = np.asarray(tensor.parts).astype(np.int64).reshape(-1, 2 + 2 * dims)
    firsts, lengths = parts[:, 2 : 2 + dims], parts[:, 2 + dims :]
    overlaps = (firsts < start + np.array(sizes, dtype=np.int64)) & (firsts + lengths > start)
    found: list[list[int]] = parts[overlaps.all(axis=1)].tolist()
    return found


def read_headers(folder: Folder, name: str, files: Iterable[str]) -> ShardIndex:
    """Return where a checkpoint's tensors are if it has no index, as those of earlier versions: from all headers.

    Raises:
        CheckpointError: A file can't be read, or is not a safetensors file.
    """
    shards = list(filter(is_shard, files))
    paths = [f"{name}/{file}" for file in shards]
    with ThreadPoolExecutor(_HEADER_THREADS) as threads:  # object stores take their time for each of many files
        return ShardIndex.of(dict(zip(shards, threads.map(partial(_parts, folder), paths), strict=True)))


def is_shard(file: str) -> bool:
    """Return whether a file of a checkpoint has tensors."""
    return file.endswith(SUFFIX)


def _parts(folder: Folder, path: str) -> dict[str, Part]:
    try:
        [head] = read_spans(folder, path, [(0, LENGTH_BYTES)])
        stop = LENGTH_BYTES + int(struct.unpack("<Q", head)[0])
        [text] = read_spans(folder, path, [(LENGTH_BYTES, stop)])
        return decode_header(bytes(text), stop)
    except OSError as error:
        raise CheckpointError(f"{folder}/{path} can't be read: {error}; try again") from error
    except (KeyError, ValueError, TypeError, struct.error) as error:
        raise CheckpointError(f"{folder}/{path} is not a shard of a checkpoint: {error!r}") from None


def _read_merged(folder: Folder, path: str, spans: Iterable[tuple[int, int]]) -> Iterator[bytes | memoryview]:
    """Read byte ranges of a file, in order of their starts; those that touch are one range, up to `RANGE_BYTES`."""
    wanted, merged = list(spans), list[tuple[int, int]]()
    for start, stop in wanted:
        if merged and start <= merged[-1][1] and stop - merged[-1][0] <= RANGE_BYTES:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    pieces = zip(merged, read_spans(folder, path, merged), strict=True)
    (first, last), data = next(pieces)
    for start, stop in wanted:
        while not first <= start <= stop <= last:
            (first, last), data = next(pieces)
        yield data[start - first : stop - first]
