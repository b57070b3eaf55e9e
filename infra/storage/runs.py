"""The run directory: where each file of a run is, and its config and summary."""

import os
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from infra.storage.atomic import write_atomic
from infra.storage.ledger import Ledger
from infra.storage.metrics_file import MetricsFile
from infra.storage.plans import PlanFiles
from schemas.config.run import RunConfig
from schemas.config.runtime import DEFAULT_RUNS_DIR
from schemas.errors import RunError
from schemas.step import RunHandle, RunSummary


def new_run_id(name: str) -> str:
    """Return a run id that sorts by time: the config's name and the UTC start time."""
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"


class RunDirectory:
    """Paths and small files of one run. Every write is atomic, or appends one flushed line.

    Args:
        path: The run's directory; its name is the run id.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    @classmethod
    def create(cls, config: RunConfig, run_id: str) -> "RunDirectory":
        """Make the directory, with `config.json` and an empty ledger.

        Raises:
            RunError: The run exists already.
        """
        run = cls(Path(config.runtime.runs_dir) / run_id)
        try:
            run.path.mkdir(parents=True)
        except FileExistsError:
            raise RunError(
                f"run {run_id!r} exists at {run.path}; resume it with: sluice resume {run.argument}"
            ) from None
        run.ledger.create()
        run.write_config(config)  # last: without it, the directory is not a run yet
        return run

    @classmethod
    def open(cls, run: str, runs_dir: str = DEFAULT_RUNS_DIR) -> "RunDirectory":
        """Find a run by its directory or its id.

        Raises:
            RunError: There is no such run; the message lists existing ones.
        """
        for path in (Path(run), Path(runs_dir) / run):
            if (path / "config.json").is_file():
                return cls(path)
        names = sorted(path.parent.name for path in Path(runs_dir).glob("*/config.json"))
        known = f"runs in {runs_dir}/: {', '.join(names[-5:])}" if names else f"{runs_dir}/ holds no runs"
        raise RunError(f"no run {run!r}: neither a run directory nor a run id; {known}")

    @classmethod
    def of(cls, run: RunHandle) -> "RunDirectory":
        """Return the directory of a run's handle."""
        return cls(Path(run.directory))

    @property
    def run_id(self) -> str:
        """The run's id, which is the directory's name."""
        return self.path.name

    @property
    def argument(self) -> str:
        """What a command takes to find it: its id if it is in the default folder of runs, else its path."""
        return self.run_id if self.path.parent == Path(DEFAULT_RUNS_DIR).resolve() else str(self.path)

    @property
    def ledger(self) -> Ledger:
        """The committed results of stages."""
        return Ledger(self.path / "ledger")

    @property
    def plans(self) -> PlanFiles:
        """The steps' plans."""
        return PlanFiles(self.path / "plans")

    @property
    def metrics(self) -> MetricsFile:
        """The reports of finished steps and evaluations."""
        return MetricsFile(self.path / "metrics.jsonl")

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, unless `checkpoint.url` is set."""
        return self.path / "policy"

    @property
    def columns(self) -> Path:
        """The folder of the durable columns, unless `store.url` is set."""
        return self.path / "columns"

    def config(self) -> RunConfig:
        """Read `config.json`.

        Raises:
            RunError: The file is not a run config of this version.
        """
        path = self.path / "config.json"
        try:
            return RunConfig.model_validate_json(path.read_text())
        except ValidationError as error:
            raise RunError(f"{path} is not a config of this version of Sluice: {error}") from None

    def write_config(self, config: RunConfig) -> None:
        """Replace `config.json`."""
        write_atomic(self.path / "config.json", config.model_dump_json(indent=2))

    def summary(self) -> RunSummary | None:
        """Return the finished run's summary; None before the run is finished."""
        path = self.path / "summary.json"
        return RunSummary.model_validate_json(path.read_text()) if path.exists() else None

    def write_summary(self, summary: RunSummary) -> None:
        """Write the finished run's summary."""
        write_atomic(self.path / "summary.json", summary.model_dump_json(indent=2))
