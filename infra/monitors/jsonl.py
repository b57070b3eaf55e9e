"""The JSON lines sink."""

import json
from pathlib import Path

from infra.monitors.rows import Position, Row


class JsonlSink:
    """A `Sink` that writes one flat JSON object per row.

    Args:
        path: The file; a line that was cut short by a kill is removed.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = _whole_lines(path)
        self._position = Position()
        for line in whole.splitlines():
            row = json.loads(line)
            field = "evaluation" if "eval/step" in row else "step"
            self._position = self._position._replace(**{field: row["step"]})
        self._file = path.open("ab")
        self._file.truncate(len(whole))

    def position(self) -> Position:
        """Return the last rows of the file."""
        return self._position

    def log(self, row: Row) -> None:
        """Append a line."""
        self._file.write(json.dumps({"step": row.step, **row.values}).encode() + b"\n")
        self._file.flush()

    def close(self, succeeded: bool) -> None:
        """Close the file."""
        self._file.close()


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]
