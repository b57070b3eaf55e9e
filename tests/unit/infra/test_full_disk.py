"""What is left of files that could not be written: nothing, so that the disk has room for others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.history.bundle_files import FORMAT, BundleManifest, pack
from infra.storage.folder import Folder, write_atomic

TOO_MUCH = 16 * 2**20  # bytes; the file system has 8 MiB
EMPTY = BundleManifest(format=FORMAT, run_id="demo", step=3, is_redacted=False, versions={"torch": "1"}, files={})


def packed(folder: Path, outside: Path) -> None:
    (outside / "file").write_bytes(bytes(TOO_MUCH))
    pack(outside, folder / "bundle.zip", EMPTY)


@pytest.mark.parametrize(
    "write",
    [
        lambda folder, _: write_atomic(folder / "kept", "x" * TOO_MUCH),
        lambda folder, _: Folder(str(folder), {}).write("kept", bytes(TOO_MUCH)),
        lambda folder, _: Folder(str(folder), {}).create("new", bytes(TOO_MUCH)),
        packed,
    ],
    ids=["write_atomic", "write", "create", "pack"],
)
def test_nothing_is_left_of_a_file_for_which_there_is_no_room(
    small_memory: Path, tmp_path: Path, write: Callable[[Path, Path], None]
) -> None:
    folder = small_memory / "full"
    folder.mkdir(exist_ok=True)
    write_atomic(folder / "kept", "before")
    with pytest.raises(OSError, match="No space left on device"):
        write(folder, tmp_path)
    assert [path.name for path in folder.iterdir()] == ["kept"]
    assert (folder / "kept").read_text() == "before"
