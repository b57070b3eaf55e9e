"""Save through torch.distributed.checkpoint: each rank writes the parts of the tensors that it holds."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from infra.checkpoints.shards import (
    INDEX,
    SUFFIX,
    FileEntry,
    ShardIndex,
    completed_future,
    encode_shard,
    file_entry,
    split_by_bytes,
)
from infra.storage.folder import Folder

FILE_BYTES = 2**30  # approximate size of a rank's files, one of which is in memory while being written


class StagedPlanner(DefaultSavePlanner):
    """Plans from the live tensors' shapes and placements, but writes the copies of this rank's parts.

    A process keeps its plan: of many ranks, rank 0 would plan millions of parts in each save, which are the same.

    Args:
        copies: This rank's part of each tensor, on the CPU.
        clear: Called once, on rank 0, before anything is planned: a plan that fails later would be kept.
    """

    def __init__(self, copies: dict[str, Tensor], clear: Callable[[], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, enable_plan_caching=True)
        self._copies, self._clear = copies, clear

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self._clear()
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._copies[index.fqn]


class ShardWriter(StorageWriter):
    """Writes each rank's part of the tensors.

    Args:
        folder: The folder of all checkpoints.
        name: The checkpoint's subfolder.
        commit: Called once, on rank 0, when all files are durable, with the files and the number of ranks.
    """

    def __init__(self, folder: Folder, name: str, commit: Callable[[dict[str, FileEntry], int], None]) -> None:
        self._folder, self._name, self._commit = folder, name, commit

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing: a writer is made for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the planner decides what is written."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(split_by_bytes(plan.items, _item_bytes, FILE_BYTES)):
            file = f"rank-{plan.storage_data:05d}-{number:05d}{SUFFIX}"
            results.append(self._write(file, items, planner))
        return completed_future(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index.fqn: result.storage_data for of_rank in results for result in of_rank}
        files: dict[str, FileEntry] = {file: entry for file, (entry, _) in written.items()}
        index = ShardIndex.of({file: parts for file, (_, parts) in written.items()}).model_dump_json().encode()
        self._folder.write(f"{self._name}/{INDEX}", index)
        self._commit(files | {INDEX: file_entry(index)}, len(results))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False  # never selected by id

    def _write(self, file: str, items: list[WriteItem], planner: SavePlanner) -> WriteResult:
        tensors = {item.index.fqn: cast(Tensor, planner.resolve_data(item)) for item in items}
        data, parts = encode_shard(tensors, {item.index.fqn: tuple(item.index.offset or ()) for item in items})
        self._folder.write(f"{self._name}/{file}", data)
        return WriteResult(MetadataIndex(file), len(data), (file_entry(data), parts))


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
