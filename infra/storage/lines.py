"""Text files that grow by whole lines: a local file, or numbered objects where files can't be appended.

    metrics/000007-0000-000002.jsonl     epoch, revision, number

The epoch is the number of the driver lock under which an object was written. Only the objects of the newest epoch and
revision are read, so a driver that has lost its lock can't change what its successor reads.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Generic, NamedTuple, Protocol, TypeVar

from infra.storage.folder import Folder, sync_folder, write_atomic
from schemas.errors import RunTakenOverError

SEGMENT_BYTES = 2**18  # from which an object is not written again, and the next lines go to a new one
_BLOCK_BYTES = 2**16  # read at once from the end of a file
_READS = 3  # as a revision may be replaced between the listing and the read
MAX_WAITING = 1024  # lines; beyond, `write` waits
Entry = TypeVar("Entry")


class Lines(Protocol):
    """The lines of one text file, each with its line break."""

    def read(self) -> Iterator[str]:
        """Yield the lines that are whole: one cut short by a kill was never committed."""
        ...

    def read_backwards(self) -> Iterator[str]:
        """Yield the same lines to the process that writes them, the last one first; reads no more than is asked for."""
        ...

    def append(self, text: str) -> None:
        """Append whole lines, durably."""
        ...

    def replace(self, lines: Iterable[str]) -> None:
        """Replace all lines at once."""
        ...

    def modified(self) -> float | None:
        """Return when a line was last written, Unix time; None if there is none."""
        ...


class LocalLines:
    """A local file, as `Lines`.

    Args:
        path: The file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def read(self) -> Iterator[str]:
        if not self._path.exists():
            return
        with self._path.open(errors="replace") as file:  # which line is damaged is for the reader to find
            yield from (line for line in file if line.endswith("\n"))

    def read_backwards(self) -> Iterator[str]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            at, rest = file.seek(0, os.SEEK_END), b""
            is_whole = False  # the lines after the last line break were cut short
            while at:
                size = min(at, _BLOCK_BYTES)
                at = file.seek(at - size)
                first, *lines = (file.read(size) + rest).split(b"\n")
                for line in reversed(lines if is_whole else lines[:-1]):
                    yield line.decode(errors="replace") + "\n"
                rest, is_whole = first, is_whole or bool(lines)
            if is_whole:
                yield rest.decode(errors="replace") + "\n"

    def append(self, text: str) -> None:
        is_new = not self._path.exists()
        with self._path.open("a") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(str(self._path))

    def replace(self, lines: Iterable[str]) -> None:
        write_atomic(self._path, "".join(lines))

    def modified(self) -> float | None:
        return self._path.stat().st_mtime if self._path.exists() else None


class _Revision(NamedTuple):
    """The objects that hold all lines."""

    epoch: int
    number: int
    names: tuple[str, ...]  # in order
    last_bytes: int


class ObjectLines:
    """Objects of a remote file system, as `Lines`. A reader sees all of a write or nothing.

    Args:
        folder: The run's directory.
        name: The subfolder.
        suffix: The end of the objects' names.
        epoch: The number of the lock that this process holds; None if it holds none, and goes on with the newest.
    """

    def __init__(self, folder: Folder, name: str, suffix: str, epoch: int | None) -> None:
        self._folder, self._name, self._suffix, self._epoch = folder, name, suffix, epoch

    def __str__(self) -> str:
        return f"{self._folder}/{self._name}"

    def read(self) -> Iterator[str]:
        yield from self._read(self._newest()).splitlines(keepends=True)

    def read_backwards(self) -> Iterator[str]:
        newest = self._newest()
        for name in reversed(newest.names) if newest else ():  # whole lines each
            yield from reversed(
                b"".join(self._folder.read_all([name])).decode(errors="replace").splitlines(keepends=True)
            )

    def append(self, text: str) -> None:
        newest = self._newest()
        epoch = self._own_epoch(newest)
        if newest is None or newest.epoch != epoch:
            self._write(epoch, 0, 0, self._read(newest) + text)
            self._remove(newest)
        elif newest.last_bytes < SEGMENT_BYTES:
            last = newest.names[-1]
            self._folder.write(last, b"".join(self._folder.read_all([last])) + text.encode())
        else:
            self._write(epoch, newest.number, len(newest.names), text)

    def replace(self, lines: Iterable[str]) -> None:
        newest = self._newest()
        epoch = self._own_epoch(newest)
        is_own = newest is not None and newest.epoch == epoch
        self._write(epoch, newest.number + 1 if newest and is_own else 0, 0, "".join(lines))
        self._remove(newest)

    def modified(self) -> float | None:
        newest = self._newest()
        return self._folder.modified(newest.names[-1]) if newest else None

    def _newest(self) -> _Revision | None:
        sizes = self._folder.sizes(self._name)
        pattern = re.compile(rf"{re.escape(self._name)}/(\d+)-(\d+)-\d+{re.escape(self._suffix)}")
        found = {name: (int(match[1]), int(match[2])) for name in sizes if (match := pattern.fullmatch(name))}
        if not found:
            return None
        newest = max(found.values())
        names = tuple(sorted(name for name, revision in found.items() if revision == newest))
        return _Revision(*newest, names, sizes[names[-1]])

    def _read(self, revision: _Revision | None) -> str:
        for _ in range(_READS):
            try:
                return b"".join(self._folder.read_all(revision.names)).decode(errors="replace") if revision else ""
            except FileNotFoundError:
                revision = self._newest()
        raise OSError(f"{self} is being replaced again and again by another process; try again")

    def _own_epoch(self, newest: _Revision | None) -> int:
        """Return the epoch in which this process writes."""
        last = newest.epoch if newest else 0
        if self._epoch is not None and last > self._epoch:
            raise RunTakenOverError(f"another driver has taken over the run, and writes {self}: this one stops")
        return last if self._epoch is None else self._epoch

    def _write(self, epoch: int, revision: int, number: int, text: str) -> None:
        name = f"{self._name}/{epoch:06d}-{revision:04d}-{number:06d}{self._suffix}"
        self._folder.write(name, text.encode())

    def _remove(self, revision: _Revision | None) -> None:
        """Remove what has been replaced; nobody reads it any more."""
        for name in revision.names if revision else ():
            self._folder.remove(name)


class LineWriter(Generic[Entry]):
    """Appends entries to a file in a thread of its own; those that wait are written, and synced, together.

    After an error nothing more is written, and whoever writes or closes gets it.

    Args:
        lines: The file.
        dump: Returns an entry's line, with its line break; called in the thread.
    """

    def __init__(self, lines: Lines, dump: Callable[[Entry], str]) -> None:
        self._lines, self._dump = lines, dump
        self._waiting: Queue[Entry | None] = Queue(MAX_WAITING)  # None: the end
        self._num_written = self._num_durable = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    def write(self, entry: Entry) -> int:
        """Have an entry appended soon; return its number, from 1 on.

        Raises:
            OSError: An earlier one can't be written.
        """
        self._check()
        self._waiting.put(entry)
        self._num_written += 1
        return self._num_written

    def is_durable(self, number: int, *, waits: bool) -> bool:
        """Return whether the entry of a number is durable; if `waits`, once all are.

        Raises:
            OSError: One can't be written.
        """
        if waits:
            self._waiting.join()
        self._check()
        return number <= self._num_durable

    def close(self) -> None:
        """Wait until all entries are durable.

        Raises:
            OSError: One can't be written.
        """
        self._waiting.put(None)
        self._thread.join()
        self._check()

    def _check(self) -> None:
        if isinstance(self._error, OSError):
            raise OSError(self._error.errno, f"{self._lines} can't be written: {self._error}") from self._error
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        is_open = True
        while is_open:
            entries = [self._waiting.get()]
            try:
                while True:
                    entries.append(self._waiting.get_nowait())
            except Empty:
                pass
            is_open = None not in entries
            if self._error is None:  # else the queue is only emptied, so that nobody waits for it
                try:
                    if text := "".join(self._dump(entry) for entry in entries if entry is not None):
                        self._lines.append(text)
                    self._num_durable += len(entries)
                except Exception as error:  # noqa: BLE001 - it is raised where the entries come from
                    self._error = error
            for _ in entries:
                self._waiting.task_done()
