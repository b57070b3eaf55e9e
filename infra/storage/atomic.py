"""Local files that are replaced whole."""

import os
from pathlib import Path


def write_atomic(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace `path` with `text`: readers and kills see the old file or the new one, never a part of it.

    Args:
        path: The file.
        text: Its new content.
        mode: Its permissions, less the umask.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
