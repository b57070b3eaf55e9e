"""The Weights & Biases sink."""

import shutil
from pathlib import Path

from infra.monitors.rows import Position, Row
from infra.storage.folder import write_atomic
from schemas.base import Frozen
from schemas.config.monitor import WandbMonitor
from schemas.config.run import RunConfig
from schemas.errors import ConfigError

INIT_SECONDS = 60  # for the library's service and its server to start a run, next to other work
FINISH_SECONDS = 15  # with a server that doesn't respond; as long, an ended process may wait for the library


def require_login(monitor: WandbMonitor) -> None:
    """Check that there are credentials if the monitor is online; they are not verified.

    Raises:
        ConfigError: There are none.
    """
    import wandb

    if monitor.mode == "online" and not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            'monitors: Weights & Biases has no API key; run `wandb login`, set WANDB_API_KEY, or set mode = "offline"'
        )


class WandbSink:
    """A `Sink` that writes to a Weights & Biases run, one history row per row.

    A resumed run continues the same Weights & Biases run. Offline, each attempt writes a folder of its own, with the
    rows that earlier ones lack; `wandb sync` joins them. The folder of an attempt that was killed is removed, and its
    rows are written again: the library keeps rows in memory for a while.

    Args:
        monitor: Where the run is.
        folder: Where the library makes its folder `wandb`.
        run_id: The run's id.
        config: The run's configuration.
    """

    def __init__(self, monitor: WandbMonitor, folder: Path, run_id: str, config: RunConfig) -> None:
        import wandb

        self._run = wandb.init(
            entity=monitor.entity,
            project=monitor.project,
            id=run_id,
            name=run_id,
            mode=monitor.mode,
            resume="allow",
            dir=folder,
            config=config.model_dump(mode="json"),
            reinit="create_new",  # independent of a run that a reward function may have opened
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
            ),
        )
        self._run.define_metric("*", step_metric="step", step_sync=False)
        self._run.define_metric("eval/*", step_metric="eval/step", step_sync=False)
        self._last = self._run.starting_step - 1  # the number of the last row that the run holds, see `log`
        self._attempts = _Attempts(folder / "wandb", run_id) if monitor.mode == "offline" else None
        if self._attempts:
            self._last = self._attempts.begin(Path(self._run.dir).parent.name)

    def position(self) -> Position:
        return Position(step=(self._last - 1) // 2, evaluation=self._last // 2)

    def log(self, row: Row) -> None:
        number = 2 * row.step + (row.axis == "step")  # so that the run's own step tells which row was its last
        self._run.log(row.values, step=number, commit=True)
        self._last = number

    def close(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)
        if self._attempts:
            self._attempts.end(self._last)


class _Note(Frozen):
    """What a file next to the folders of a run's attempts says of them."""

    last: int = -1  # number of the last row in the folders of attempts that have ended
    unfinished: str | None = None  # the folder of the attempt that has not


class _Attempts:
    """The attempts of a run to log offline."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder, self._path = folder, folder / f"{run_id}.json"

    def begin(self, attempt: str) -> int:
        """Note a new attempt, and remove the one that was killed; return the number of the last row of the others."""
        note = _Note.model_validate_json(self._path.read_text()) if self._path.exists() else _Note()
        if note.unfinished:
            shutil.rmtree(self._folder / note.unfinished, ignore_errors=True)
        write_atomic(self._path, note.replace(unfinished=attempt).model_dump_json())
        return note.last

    def end(self, last: int) -> None:
        """Note that the attempt has ended, with all rows up to number `last`."""
        write_atomic(self._path, _Note(last=last).model_dump_json())
