"""Local files that are replaced whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def removed_if_it_fails(path: str | Path) -> Iterator[None]:
    """Remove a file if what writes it fails: on a full disk, it would take the space that others need."""
    try:
        yield
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a hidden file next to `path`, which it then replaces; nothing is left of one that fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    with removed_if_it_fails(temporary):
        yield temporary
        os.replace(temporary, path)


def write_atomic(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace `path` with `text`: readers and kills see the old file or the new one, never a part of it.

    Args:
        path: The file.
        text: Its new content.
        mode: Its permissions, less the umask.
    """
    with (
        replacing(path) as temporary,
        open(temporary, "w", opener=lambda name, flags: os.open(name, flags, mode)) as file,
    ):
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
