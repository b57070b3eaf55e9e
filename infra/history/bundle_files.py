"""A bundle: one zip file with files of a run, and a manifest of their sizes and SHA-256 sums. Nothing is pickled.

    bundle.json       the manifest
    run/config.json   the files, by their names in the run's directory

A bundle may come from anywhere: no name, size or byte is used before it was checked.
"""

import hashlib
import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated

from pydantic import Field, NonNegativeInt, ValidationError

from infra.storage.folder import replacing
from schemas.base import Frozen
from schemas.batch import SafeName
from schemas.errors import BundleError, describe

FORMAT = 2  # to be raised when an older Sluice can't read what is written
MANIFEST, ROOT = "bundle.json", "run/"
_MAX_MANIFEST_BYTES = 2**24
_PIECE_BYTES = 2**20
_TIME = (1980, 1, 1, 0, 0, 0)  # of every file: equal content gives equal bundles

BundledName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$", max_length=500)
]  # without "..", not absolute


class BundledFile(Frozen):
    """One file of a bundle."""

    num_bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class BundleManifest(Frozen):
    """The manifest of a bundle."""

    format: NonNegativeInt
    run_id: SafeName
    step: NonNegativeInt
    is_redacted: bool  # texts were left out
    versions: dict[str, str]  # of Sluice and its main dependencies when the step was run, by distribution
    files: dict[BundledName, BundledFile]


def pack(folder: Path, out: Path, manifest: BundleManifest) -> BundleManifest:
    """Write all files of a folder as a bundle, which appears only once complete; return its manifest.

    Args:
        folder: The folder.
        out: The file to write.
        manifest: The manifest but for its files.

    Raises:
        BundleError: The file exists.
    """
    if out.exists():
        raise BundleError(f"{out} exists; choose another name, or remove it")
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    manifest = manifest.replace(files={name: _describe(path) for name, path in paths.items()})
    with replacing(out) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as file:
        file.writestr(zipfile.ZipInfo(MANIFEST, _TIME), manifest.model_dump_json(indent=2))
        for name, path in paths.items():
            with path.open("rb") as source, file.open(zipfile.ZipInfo(ROOT + name, _TIME), "w", force_zip64=True) as to:
                for piece in _pieces(source):
                    to.write(piece)
    return manifest


def unpack(bundle: Path, folder: Path) -> BundleManifest:
    """Write all files of a bundle to an empty folder, checked; return its manifest.

    Raises:
        BundleError: It is no bundle, one of a newer format, or damaged: a name is unsafe or not in the manifest, or a
            file is missing, larger or different.
    """
    try:
        with zipfile.ZipFile(bundle) as file:
            manifest = _read_manifest(file, bundle)
            _check_names(file, bundle, manifest)
            for name, entry in manifest.files.items():
                _extract(file, bundle, name, entry, folder / name)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError, EOFError) as error:
        raise BundleError(f"{bundle} can't be read as a bundle: {describe(error)}") from None
    return manifest


def _read_manifest(file: zipfile.ZipFile, bundle: Path) -> BundleManifest:
    infos = [info for info in file.infolist() if info.filename == MANIFEST]
    if len(infos) != 1 or infos[0].file_size > _MAX_MANIFEST_BYTES:
        raise BundleError(f"{bundle} is no bundle: it has no {MANIFEST}, or one that is too large")
    with file.open(infos[0]) as source:
        content = source.read(_MAX_MANIFEST_BYTES)
    try:
        values = json.loads(content)
        if isinstance(values, dict) and isinstance(found := values.get("format"), int) and found > FORMAT:
            raise BundleError(
                f"{bundle} is a bundle of format {found}, but this Sluice reads only formats up to {FORMAT}: reproduce "
                "it with the newer Sluice that wrote it"
            )
        return BundleManifest.model_validate(values)
    except ValidationError as error:
        found = error.errors()[0]
        place = ".".join(map(str, found["loc"]))
        raise BundleError(f"{bundle}: {MANIFEST} is not a manifest: {place}: {found['msg']}") from None
    except ValueError as error:
        raise BundleError(f"{bundle}: {MANIFEST} is not a manifest: {error}") from None


def _check_names(file: zipfile.ZipFile, bundle: Path, manifest: BundleManifest) -> None:
    names = Counter(info.filename for info in file.infolist())
    expected = {MANIFEST, *(ROOT + name for name in manifest.files)}
    if repeated := next((name for name, count in names.items() if count > 1), None):
        raise BundleError(f"{bundle} is damaged: {repeated!r} is in it twice")
    if unknown := sorted(set(names) - expected):
        raise BundleError(f"{bundle} is damaged: {unknown[0]!r} is not in its manifest")
    if missing := sorted(expected - set(names)):
        raise BundleError(f"{bundle} is damaged: {missing[0]} is missing")


def _extract(file: zipfile.ZipFile, bundle: Path, name: str, entry: BundledFile, target: Path) -> None:
    """Write one file; never more than the manifest says."""
    info, digest, num_bytes = file.getinfo(ROOT + name), hashlib.sha256(), 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with file.open(info) as source, target.open("xb") as to:
        for piece in _pieces(source):
            num_bytes += len(piece)
            if num_bytes > entry.num_bytes:
                raise BundleError(
                    f"{bundle} is damaged: {name} has more than the {entry.num_bytes} bytes of its manifest"
                )
            digest.update(piece)
            to.write(piece)
    if num_bytes != entry.num_bytes or digest.hexdigest() != entry.sha256:
        raise BundleError(f"{bundle} is damaged: {name} is not what its manifest says")


def _describe(path: Path) -> BundledFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return BundledFile(num_bytes=path.stat().st_size, sha256=digest.hexdigest())


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        yield piece
