"""The sinks that write files: JSON lines, and TensorBoard's event files."""

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
        return self._position

    def log(self, row: Row) -> None:
        self._file.write(json.dumps({"step": row.step, **row.values}).encode() + b"\n")
        self._file.flush()

    def close(self, succeeded: bool) -> None:
        self._file.close()


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


class TensorBoardSink:
    """A `Sink` that writes TensorBoard event files.

    Args:
        folder: Where to write; a resumed run adds a file.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._position = _position(folder)
        # TensorBoard drops what earlier files hold of this step and later ones: a kill may have left a part of it.
        self._writer = SummaryWriter(str(folder), purge_step=self._position.step + 1)

    def position(self) -> Position:
        """Return the last step of the event files; evaluations of later steps are purged."""
        return self._position

    def log(self, row: Row) -> None:
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.step)
        self._writer.flush()

    def close(self, succeeded: bool) -> None:
        self._writer.close()


def _position(folder: Path) -> Position:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not folder.exists():
        return Position()
    events = EventAccumulator(str(folder), size_guidance={"scalars": 1}).Reload()  # only the last ones
    held = events.Scalars("step") if "step" in events.Tags()["scalars"] else []
    step = held[-1].step if held else -1
    return Position(step, step)  # an evaluation of version k is logged before step k
