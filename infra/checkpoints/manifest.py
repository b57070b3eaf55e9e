"""The manifest of a complete checkpoint, written last, and the choice of the checkpoint to keep as the best."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from schemas.base import Frozen
from schemas.step import EvalReport, UpdateReport
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


def best_version(evals: Sequence[EvalReport], versions: Sequence[int]) -> int | None:
    """Return the evaluated version with the best score, the newest on a tie; None if none was evaluated."""
    measured = [report for report in evals if report.policy_version in versions]
    best = max(measured, key=lambda report: (report.score, report.policy_version), default=None)
    return None if best is None else best.policy_version
