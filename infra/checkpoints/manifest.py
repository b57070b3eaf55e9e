"""The manifest of a complete checkpoint, written last."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from schemas.base import Frozen
from schemas.step import UpdateReport
from schemas.weights import Adapter

MANIFEST = "manifest.json"
ASSETS = "hf"  # the folder of config.json, generation_config.json and the tokenizer's files

FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*(/\w[\w.-]*)*$")]  # relative to the checkpoint's folder


class FileEntry(Frozen):
    """One file of a checkpoint."""

    num_bytes: NonNegativeInt
    checksum: str  # XXH3-64, hex


class Manifest(Frozen):
    """A complete checkpoint."""

    version: NonNegativeInt  # policy version = number of completed steps; also the data cursor
    num_updates: NonNegativeInt  # optimizer steps so far
    report: UpdateReport | None  # of the step that produced this version; None for the starting weights
    num_ranks: PositiveInt  # that wrote it; any number can read it
    adapter: Adapter | None  # None: the checkpoint holds all weights
    files: dict[FileName, FileEntry]
