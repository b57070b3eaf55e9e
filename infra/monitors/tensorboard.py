"""The TensorBoard sink."""

from pathlib import Path

from infra.monitors.rows import Position, Row


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
        """Write each metric as a scalar."""
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.step)
        self._writer.flush()

    def close(self, succeeded: bool) -> None:
        """Close the event file."""
        self._writer.close()


def _position(folder: Path) -> Position:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not folder.exists():
        return Position()
    events = EventAccumulator(str(folder), size_guidance={"scalars": 1}).Reload()  # only the last ones
    held = events.Scalars("step") if "step" in events.Tags()["scalars"] else []
    step = held[-1].step if held else -1
    return Position(step, step)  # an evaluation of version k is logged before step k
