"""The files of a run's checkpoints: list, verify, commit and remove them.

    step-000012/rank-00000-00000.safetensors   the part of each tensor that rank 0 held
    step-000012/index.json                     where each part is
    step-000012/hf/config.json, ...            the files of a Hugging Face folder other than the weights
    step-000012/manifest.json                  written last: a folder without it is not a checkpoint

Only names that a manifest lists are ever read.
"""

import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem
from pydantic import Field, NonNegativeInt, PositiveInt

from infra.checkpoints.shards import FileEntry, file_entry, read_spans
from infra.storage.folder import Folder
from schemas.base import Frozen
from schemas.errors import CheckpointError
from schemas.step import EvalReport, UpdateReport, comparable
from schemas.weights import Adapter

MANIFEST = "manifest.json"
ASSETS = "hf"  # the folder of config.json, generation_config.json and the tokenizer's files

logger = logging.getLogger(__name__)

Found = TypeVar("Found")
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*(/\w[\w.-]*)*$")]  # relative to the checkpoint's folder
_CHECK_BYTES, _CHECK_SPANS = 2**23, 8  # files are checked in spans of this size, this many per request


class Manifest(Frozen):
    """A complete checkpoint."""

    version: NonNegativeInt  # policy version = number of completed steps; also the data cursor
    num_updates: NonNegativeInt  # optimizer steps so far
    report: UpdateReport | None  # of the step that produced this version; None for the starting weights
    num_ranks: PositiveInt  # that wrote it; any number can read it
    adapter: Adapter | None  # None: the checkpoint holds all weights
    files: dict[FileName, FileEntry]


class CheckpointFiles:
    """The checkpoints under one URL, as files.

    Args:
        url: Any fsspec URL or a local path; all ranks must reach it.
        storage_options: Options that fsspec passes to the file system.
    """

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        self._url = url.rstrip("/")
        self._folder = Folder(url, storage_options or {})
        self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False, **(storage_options or {}))

    def __str__(self) -> str:
        return self._url

    def path(self, version: int) -> str:
        """Return the path or URL of a version's checkpoint, whether or not it exists."""
        return f"{self._url}/{step_name(version)}"

    def complete_versions(self) -> list[int]:
        """Return the versions that have a manifest, oldest first; their files may be damaged."""
        found = (re.fullmatch(rf"step-(\d+)/{MANIFEST}", name) for name in self._folder.sizes())
        return sorted(int(match.group(1)) for match in found if match)

    def newest(self) -> tuple[int, Manifest] | None:
        """Return the newest checkpoint whose files match its manifest; None if none does. Reads all of its bytes.

        Unfinished and damaged checkpoints are skipped, with a warning that says what is wrong with them.
        """
        return next(self.undamaged(self.versions(), self.verify), None)

    def undamaged(
        self, versions: Sequence[int], verify: Callable[[int], Found], level: int = logging.WARNING
    ) -> Iterator[tuple[int, Found]]:
        """Yield those of these versions, oldest first, that can be verified, the newest first, and what was found.

        Args:
            versions: The versions.
            verify: Returns such as a version's manifest, or raises a CheckpointError, which is logged.
            level: At which level.
        """
        for version in reversed(versions):
            try:
                yield version, verify(version)
            except CheckpointError as error:
                logger.log(level, "skipped a checkpoint: %s", error)

    def read_manifest(self, version: int) -> Manifest:
        """Return a checkpoint's manifest.

        Raises:
            CheckpointError: The manifest is missing, because the checkpoint was never finished, or is damaged.
        """
        path = f"{self.path(version)}/{MANIFEST}"
        if (data := self._folder.read(f"{step_name(version)}/{MANIFEST}")) is None:
            raise CheckpointError(f"{path} is missing: the checkpoint was never finished")
        try:
            return Manifest.model_validate_json(data)
        except ValueError as error:
            raise CheckpointError(f"{path} is not a manifest: {error}") from None

    def verify(self, version: int, part: int = 0, num_parts: int = 1) -> Manifest:
        """Check every file of a checkpoint against its manifest, and return the manifest.

        Args:
            version: The checkpoint's version.
            part: Which of `num_parts` parts of the files' contents to check; their sizes are checked in any case.
            num_parts: Among how many processes the work is divided.

        Raises:
            CheckpointError: The manifest is missing or unreadable, or a file is missing or differs.
        """
        manifest = self.read_manifest(version)
        self._check_sizes(version, manifest.files)
        for name, entry in islice(manifest.files.items(), part, None, num_parts):
            file = f"{self.path(version)}/{name}"
            try:
                checksum = self._checksum(f"{step_name(version)}/{name}", entry.num_bytes)
            except OSError as error:
                raise CheckpointError(f"{file} can't be read: {error}") from error
            if checksum != entry.checksum:
                raise CheckpointError(f"{file} is damaged: its checksum is {checksum}, expected {entry.checksum}")
        return manifest

    def read_file(self, version: int, name: str, entry: FileEntry) -> bytes:
        """Return the content of one file of a checkpoint.

        Raises:
            CheckpointError: It is missing, or not what the manifest says.
        """
        data = self._folder.read(f"{step_name(version)}/{name}")
        if data is None or file_entry(data) != entry:
            raise CheckpointError(f"{self.path(version)}/{name} is missing or damaged")
        return data

    def copy_from(self, source: "CheckpointFiles") -> list[int]:
        """Copy all complete checkpoints from another place, where they stay; return their versions.

        Damaged ones are skipped, with a warning. Others that are here are removed; if the other place has none, they
        stay.

        Raises:
            CheckpointError: A place can't be read, or written.
        """
        try:
            copied = [version for version in source.complete_versions() if self._copy(source, version)]
            for version in self.versions() if copied else ():
                if version not in copied:
                    self._remove(version)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoints in {source} can't be copied to {self}: {error}; check both places, and resume again"
            ) from error
        return copied

    def take_from(self, source: "CheckpointFiles", version: int) -> None:
        """Have a complete checkpoint of another place here, too: by hard links where possible, else as a copy.

        Raises:
            CheckpointError: It isn't complete there, or a file that is copied is damaged.
        """
        name, manifest = step_name(version), source.read_manifest(version)
        for file, entry in manifest.files.items():
            if not self._folder.link(source._folder, f"{name}/{file}"):
                self._folder.write(f"{name}/{file}", source.read_file(version, file, entry))
        self._commit(manifest)

    def remove_all(self) -> None:
        """Remove all checkpoints, complete or not."""
        self._clear(0)

    @contextmanager
    def assets(self, version: int) -> Iterator[Path]:
        """Hold a temporary local folder with a copy of the checkpoint's config and tokenizer files.

        Raises:
            CheckpointError: The checkpoint has no such files, or one is damaged.
        """
        entries = {
            name: entry for name, entry in self.read_manifest(version).files.items() if name.startswith(f"{ASSETS}/")
        }
        if not entries:
            raise CheckpointError(f"{self.path(version)} was written without config and tokenizer files")
        with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
            for name, entry in entries.items():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self.read_file(version, name, entry))
            yield Path(folder, ASSETS)

    def _write_assets(self, version: int, write: Callable[[Path], None] | None) -> dict[str, FileEntry]:
        if write is None:
            return {}
        entries = {}
        with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
            write(Path(folder))
            for file in sorted(file for file in Path(folder).rglob("*") if file.is_file()):
                name, data = f"{ASSETS}/{file.relative_to(folder).as_posix()}", file.read_bytes()
                self._folder.write(f"{step_name(version)}/{name}", data)
                entries[name] = file_entry(data)
        return entries

    def _commit(self, manifest: Manifest) -> None:
        """Make the checkpoint complete by writing its manifest, once all of its files are durable."""
        try:
            self._check_sizes(manifest.version, manifest.files)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; all ranks must write to the same folder") from None
        self._folder.write(f"{step_name(manifest.version)}/{MANIFEST}", manifest.model_dump_json(indent=2).encode())
        self._sync_root()

    def _clear(self, version: int) -> None:
        """Remove this version and newer ones: after a rollback, newer checkpoints would take precedence over it."""
        for existing in self.versions():
            if existing >= version:
                self._remove(existing)

    def _remove(self, version: int) -> None:
        """Remove a checkpoint if it exists; its manifest goes first."""
        self._folder.remove(f"{step_name(version)}/{MANIFEST}")
        self._folder.remove_folder(step_name(version))

    def versions(self) -> list[int]:
        """Return all versions that have any files, oldest first."""
        try:
            names = [str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []
        return sorted(int(match.group(1)) for name in names if (match := re.fullmatch(r"step-(\d+)", name)))

    def _copy(self, source: "CheckpointFiles", version: int) -> bool:
        """Copy one checkpoint, its manifest last; return whether it was undamaged."""
        name = step_name(version)
        try:
            manifest = source.read_manifest(version)
            for file, entry in manifest.files.items():
                self._folder.write(f"{name}/{file}", source.read_file(version, file, entry))
        except CheckpointError as error:
            logger.warning("skipped a checkpoint: %s", error)
            return False
        self._commit(manifest)
        return True

    def _check_sizes(self, version: int, files: Mapping[str, FileEntry]) -> None:
        sizes = self._folder.sizes(step_name(version))
        for name, entry in files.items():
            if (size := sizes.get(f"{step_name(version)}/{name}")) is None:
                raise CheckpointError(f"{self.path(version)}/{name} is missing")
            if size != entry.num_bytes:
                raise CheckpointError(f"{self.path(version)}/{name} has {size} bytes, expected {entry.num_bytes}")

    def _checksum(self, path: str, num_bytes: int) -> str:
        checksum = xxhash.xxh3_64()
        step = _CHECK_BYTES * _CHECK_SPANS
        for first in range(0, num_bytes, step):
            stop = min(first + step, num_bytes)
            starts = range(first, stop, _CHECK_BYTES)
            for piece in read_spans(self._folder, path, [(start, min(start + _CHECK_BYTES, stop)) for start in starts]):
                checksum.update(piece)
        return str(checksum.hexdigest())

    def _sync_root(self) -> None:
        """Sync the local root folder, so that a new checkpoint's folder survives a crash of the machine."""
        if isinstance(self._fs, LocalFileSystem):
            root = os.open(self._root, os.O_RDONLY)
            try:
                os.fsync(root)
            finally:
                os.close(root)


def step_name(version: int) -> str:
    """Return the folder name of a version's checkpoint."""
    return f"step-{version:06d}"


def best_version(evals: Sequence[EvalReport], versions: Sequence[int]) -> int | None:
    """Return the version with the best score of the newest evaluation, the newest on a tie; None without one."""
    measured = [report for report in comparable(evals) if report.policy_version in versions]
    best = max(measured, key=lambda report: (report.score, report.policy_version), default=None)
    return None if best is None else best.policy_version
