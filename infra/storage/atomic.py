"""Local files that are replaced whole."""

import os
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` with `text`: readers and kills see the old file or the new one, never a part of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
