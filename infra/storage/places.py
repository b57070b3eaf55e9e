"""Places of files: a local path or any fsspec URL, as text."""

from pathlib import Path

_LOCAL = ("file://", "local://")


def is_url(place: str) -> bool:
    """Return whether a place is a URL of a file system that is not local."""
    return "://" in place and not place.startswith(_LOCAL)


def resolve(place: str | Path) -> str:
    """Return an absolute local path without links, or a URL without its last slash.

    A `file://` URL is a local path.
    """
    text = str(place)
    if is_url(text):
        return text.rstrip("/")
    for protocol in _LOCAL:
        text = text.removeprefix(protocol)
    return str(Path(text).resolve())


def join(place: str, name: str) -> str:
    """Return the place of a file or folder within a resolved place."""
    return f"{place.rstrip('/')}/{name}"


def split(place: str) -> tuple[str, str]:
    """Return the folder that holds a resolved place, and the place's name in it."""
    folder, _, name = place.rpartition("/")
    return folder or "/", name
