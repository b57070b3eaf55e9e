"""The run directory: where each file of a run is, and its config and summary."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from infra.storage.atomic import write_atomic
from infra.storage.decisions import DecisionsFile
from infra.storage.ledger import Ledger
from infra.storage.metrics_file import MetricsFile
from infra.storage.plans import PlanFiles
from schemas.batch import SafeName
from schemas.config.folders import DEFAULT_RUNS_DIR
from schemas.config.run import RunConfig
from schemas.errors import RunError
from schemas.step import RunHandle, RunSummary

_RUN_ID: TypeAdapter[str] = TypeAdapter(SafeName)


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
        run = cls.require_absent(config, run_id)
        run.path.mkdir(parents=True, exist_ok=True)  # a driver may have been killed here
        run.ledger.create()
        run.write_config(config)  # last: without it, the directory is not a run yet
        return run

    @classmethod
    def require_absent(cls, config: RunConfig, run_id: str) -> "RunDirectory":
        """Return where a new run will be, in the config's folder of runs.

        Raises:
            RunError: The run exists already.
        """
        run = cls.at(config, run_id)
        if run.exists:
            raise RunError(f"run {run_id!r} exists; resume it with: sluice resume {run.argument}")
        return run

    @classmethod
    def open_or_create(cls, config: RunConfig, run_id: str) -> "RunDirectory":
        """Return the run of that id in the config's folder of runs; make it if it doesn't exist."""
        run = cls.at(config, run_id)
        return run if run.exists else cls.create(config, run_id)

    @classmethod
    def open(cls, run: str, runs_dir: str = DEFAULT_RUNS_DIR) -> "RunDirectory":
        """Find a run by its directory or its id.

        Raises:
            RunError: There is no such run; the message lists existing ones.
        """
        for path in (Path(run), Path(runs_dir) / run):
            if (run_directory := cls(path)).exists:
                return run_directory
        names = sorted(path.parent.name for path in Path(runs_dir).glob("*/config.json"))
        known = f"runs in {runs_dir}/: {', '.join(names[-5:])}" if names else f"{runs_dir}/ holds no runs"
        raise RunError(f"no run {run!r}: neither a run directory nor a run id; {known}")

    @classmethod
    def at(cls, config: RunConfig, run_id: str) -> "RunDirectory":
        """Return where a config's run of that id is, or will be.

        Raises:
            RunError: The id is not the name of a folder.
        """
        try:
            name = _RUN_ID.validate_python(run_id)
        except ValidationError as error:
            raise RunError(f"the run id {error.errors()[0]['ctx']['error']}") from None
        return cls(Path(config.runtime.runs_dir) / name)

    @classmethod
    def of(cls, run: RunHandle) -> "RunDirectory":
        """Return the directory of a run's handle."""
        return cls(Path(run.directory))

    @property
    def exists(self) -> bool:
        """Whether the run was started."""
        return (self.path / "config.json").is_file()

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
    def decisions(self) -> DecisionsFile:
        """What people decided when the run paused for approval."""
        return DecisionsFile(self.path / "decisions.json")

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
            return RunConfig.model_validate_json(_upgrade(path.read_text()))
        except ValidationError as error:
            raise RunError(f"{path} is not a config of this version of Sluice: {error}") from None

    def write_config(self, config: RunConfig) -> None:
        """Replace `config.json`."""
        write_atomic(self.path / "config.json", config.model_dump_json(indent=2))

    def write_store_endpoint(self, location: str, token: str, certificate: str) -> None:
        """Replace `store.json`, by which Arrow Flight clients of the same user find the run's column store."""
        endpoint = {"location": location, "token": token, "certificate": certificate}
        write_atomic(self.path / "store.json", json.dumps(endpoint), mode=0o600)

    def summary(self) -> RunSummary | None:
        """Return the finished run's summary; None before the run is finished."""
        path = self.path / "summary.json"
        return RunSummary.model_validate_json(path.read_text()) if path.exists() else None

    def write_summary(self, summary: RunSummary) -> None:
        """Write the finished run's summary."""
        write_atomic(self.path / "summary.json", summary.model_dump_json(indent=2))


def _upgrade(text: str) -> str:
    """Return the config of a run that Sluice 0.2 started as one of this version."""
    config = json.loads(text)
    if config.get("store", {}).get("kind") == "ray":
        config["store"]["kind"] = "shared"
    if config.get("runtime", {}).get("weight_transport") == "object_store":
        config["runtime"]["weight_transport"] = "shared_memory"
    if config.get("runtime", {}).pop("tensorboard", False):
        config["monitors"] = [{"kind": "tensorboard"}]
    return json.dumps(config)
