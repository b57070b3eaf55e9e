"""A run's checkpoints: saved in the background by all ranks together, loaded by any number of ranks, pruned."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from infra.checkpoints.files import CheckpointFiles, Manifest, step_name
from infra.checkpoints.reading import ShardReader, read_headers
from infra.checkpoints.shards import DTYPES, INDEX, FileEntry, ShardIndex
from infra.checkpoints.writing import ShardWriter, StagedPlanner
from infra.storage import places
from infra.storage.runs import RunDirectory
from rl_core.training.sharding import local_tensor
from schemas.config.store import CheckpointConfig
from schemas.errors import CheckpointError, StoreError
from schemas.step import UpdateReport
from schemas.weights import Adapter

_MAX_NAMED = 5  # tensors listed in one message

# Running in one process without torch.distributed is supported.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class PendingCheckpoint:
    """A checkpoint that is being written in the background."""

    def __init__(self, version: int, written: Future[str]) -> None:
        self.version, self._written = version, written
        self.is_reported = False  # whether `wait` has been called

    @property
    def is_complete(self) -> bool:
        """Whether the checkpoint has been written."""
        return self._written.done() and self._written.exception() is None

    def wait(self) -> str:
        """Return the checkpoint's path or URL once it is complete, on all ranks.

        Raises:
            CheckpointError: It could not be written; the previous checkpoint is still the newest.
            RuntimeError: Another rank is gone, as reported by torch.distributed.
        """
        self.is_reported = True
        return self._written.result()


class CheckpointStore(CheckpointFiles):
    """The checkpoints under one URL. One process, or one group of ranks, writes; any number of processes read.

    Args:
        url: Any fsspec URL or a local path; all ranks must reach it.
        storage_options: Options that fsspec passes to the file system.
    """

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        super().__init__(url, storage_options)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: PendingCheckpoint | None = None
        self._opened: dict[int, tuple[Manifest, ShardIndex]] = {}

    def save(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        num_updates: int,
        report: UpdateReport | None,
        adapter: Adapter | None = None,
        write_assets: Callable[[Path], None] | None = None,
        process_group: ProcessGroup | None = None,
    ) -> PendingCheckpoint:
        """Copy the tensors, and write the checkpoint of `version` in the background.

        Waits for a previous save that is still running. Checkpoints of this and newer versions are removed: the run
        has been rolled back behind them.

        Args:
            version: The policy version.
            tensors: Tensors by name, with the same names on every rank. A plain tensor is the same on all ranks and is
                written by one of them; of a DTensor, each rank writes its part. They may change once this returns.
            num_updates: The number of optimizer steps so far.
            report: The report of the step that produced this version.
            adapter: The base that the weights are an adapter of; None for full weights.
            write_assets: Writes config and tokenizer files to a folder; called by rank 0, in the background.
            process_group: The ranks that save together: a gloo group that nothing else uses during a save. None for a
                single process.

        Raises:
            CheckpointError: The previous save failed, and its failure has not been raised yet.
        """
        self._await_pending()
        names = sorted(tensors)  # the order in the files must not depend on the caller
        live = {name: tensors[name].detach() for name in names}
        copies = {name: local_tensor(tensor).to("cpu", copy=True) for name, tensor in live.items()}

        def commit(files: dict[str, FileEntry], num_ranks: int) -> None:
            manifest = Manifest(
                version=version,
                num_updates=num_updates,
                report=report,
                num_ranks=num_ranks,
                adapter=adapter,
                files=files | self._write_assets(version, write_assets),
            )
            self._commit(manifest)

        planner = StagedPlanner(copies, lambda: self._clear(version))
        writer = ShardWriter(self._folder, step_name(version), commit)
        written = self._executor.submit(self._write, version, live, planner, writer, process_group)
        self._pending = PendingCheckpoint(version, written)
        return self._pending

    @contextmanager
    def opened(self, version: int) -> Iterator[None]:
        """Read where a checkpoint's tensors are once for all calls of the block, which may be many.

        Raises:
            CheckpointError: The checkpoint or one of its files is missing.
        """
        if version in self._opened:  # by an outer block
            yield
            return
        self._opened[version] = self._read_index(version)
        try:
            yield
        finally:
            del self._opened[version]

    def load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Read a checkpoint's values into tensors, in place, bit for bit.

        Each rank calls this on its own and reads only what it holds; there may be more or fewer ranks than wrote the
        checkpoint. Tensors of the checkpoint that are not in `tensors` are ignored. Files are not verified; `newest`
        and `verify` do that.

        Raises:
            CheckpointError: The checkpoint or one of its files is missing, or a tensor is missing or has another shape
                or dtype.
        """
        manifest, index = self._read_index(version)
        _check_tensors(self.path(version), index, tensors)
        values = {name: tensor.detach() for name, tensor in tensors.items()}
        try:
            load(
                values,
                storage_reader=ShardReader(self._folder, step_name(version), manifest.files, index, values),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,  # ranks read independently
            )
        except CheckpointException as error:
            raise CheckpointError(f"{self.path(version)} can't be loaded: {_reasons(error)}") from error

    def check_tensors(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Check that a checkpoint has these tensors, which may be on any device, including `meta`; reads no values.

        Raises:
            CheckpointError: The checkpoint or one of its files is missing, or a tensor is missing or has another shape
                or dtype.
        """
        _check_tensors(self.path(version), self._read_index(version)[1], tensors)

    def tensor_names(self, version: int) -> list[str]:
        """Return the names of a checkpoint's tensors.

        Raises:
            CheckpointError: The checkpoint or one of its files is missing.
        """
        return sorted(self._read_index(version)[1].tensors)

    def read(self, version: int, name: str) -> Tensor:
        """Return a whole tensor of a checkpoint, on the CPU.

        Raises:
            CheckpointError: The checkpoint, one of its files or the tensor is missing.
        """
        if (stored := self._read_index(version)[1].tensors.get(name)) is None:
            raise CheckpointError(f"{self.path(version)} has no tensor {name}")
        tensor = torch.empty(stored.size, dtype=DTYPES[stored.dtype])
        self.load(version, {name: tensor})
        return tensor

    def retain(self, newest: int, keep_last: int, *others: int | None) -> None:
        """Remove all checkpoints but the newest ones and these others, and unfinished ones older than the newest.

        Only the process that saves (rank 0) may call this.

        Args:
            newest: The newest version that is known to be undamaged. Newer ones, such as one that is being saved, are
                neither removed nor counted.
            keep_last: The number of newest checkpoints to keep; at least 1.
            others: Versions to keep as well; None stands for none.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}, expected at least 1: the newest checkpoint is always kept")
        complete = [version for version in self.complete_versions() if version <= newest]
        kept = {*complete[-keep_last:], *others}
        for version in self.versions():
            if complete and version < complete[-1] and version not in kept:
                self._remove(version)

    def _await_pending(self) -> None:
        """Wait for a save in progress, and raise its failure unless that has been raised already."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.is_reported:
            pending.wait()

    def _write(
        self,
        version: int,
        live: dict[str, Tensor],
        planner: StagedPlanner,
        writer: ShardWriter,
        process_group: ProcessGroup | None,
    ) -> str:
        path = self.path(version)
        try:
            save(
                live,
                storage_writer=writer,
                planner=planner,
                process_group=process_group,
                no_dist=process_group is None,
            )
        except CheckpointException as error:
            raise CheckpointError(f"{path} can't be written: {_reasons(error)}") from error
        return path

    def _read_index(self, version: int) -> tuple[Manifest, ShardIndex]:
        if version in self._opened:
            return self._opened[version]
        manifest = self.read_manifest(version)
        self._check_sizes(version, manifest.files)
        if (entry := manifest.files.get(INDEX)) is None:
            return manifest, read_headers(self._folder, step_name(version), manifest.files)
        return manifest, ShardIndex.model_validate_json(self.read_file(version, INDEX, entry))


def open_checkpoints(directory: RunDirectory, config: CheckpointConfig) -> CheckpointStore:
    """Return a run's checkpoints: under its run id at `checkpoint.url` if set, else in its directory."""
    return CheckpointStore(places.join(config.url, directory.run_id) if config.url else directory.checkpoints)


def _check_tensors(path: str, index: ShardIndex, tensors: Mapping[str, Tensor]) -> None:
    problems = []
    for name, tensor in tensors.items():
        if (stored := index.tensors.get(name)) is None:
            problems.append(f"{name} is missing")
        elif stored.size != tuple(tensor.size()) or DTYPES[stored.dtype] != tensor.dtype:
            problems.append(
                f"{name} is {list(stored.size)} {DTYPES[stored.dtype]}, expected {list(tensor.size())} {tensor.dtype}"
            )
    if problems:
        more = f" and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise CheckpointError(
            f"{path} doesn't match this model and optimizer: {'; '.join(problems[:_MAX_NAMED])}{more}; "
            "resume with the config it was written under"
        )


def _reasons(error: CheckpointException) -> str:
    """Return the failures of all ranks as one line."""
    reasons = {rank: failure[0] for rank, failure in error.failures.items()}
    return "; ".join(
        f"rank {rank}: {reason}" if isinstance(reason, CheckpointError | StoreError) else f"rank {rank}: {reason!r}"
        for rank, reason in sorted(reasons.items())
    )
