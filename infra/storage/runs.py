"""The run directory: configuration, ledger, checkpoints, metrics and the driver's lock."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from schemas.config.load import changed_keys
from schemas.config.run import RunConfig
from schemas.errors import RunError
from schemas.plan import StepPlan
from schemas.step import EvalReport, RunHandle, RunSummary, StepReport

# What a resumed run may have otherwise than before: where and how long it trains, not what.
CHANGEABLE = ("steps", "runtime.", "packing.", "eval.", "checkpoint.every_steps", "checkpoint.keep_")
FIXED = ("runtime.max_staleness",)


def new_run_id(name: str) -> str:
    """A run id that sorts by time: the config's name and the UTC start."""
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"


class RunDirectory:
    """Paths and small files of one run. All writes are atomic or append one flushed line.

    Args:
        path: The run's directory; its name is the run id.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    @classmethod
    def create(cls, config: RunConfig, run_id: str) -> "RunDirectory":
        """Make the directory and write `config.json`.

        Raises:
            RunError: The run exists already.
        """
        run = cls(Path(config.runtime.runs_dir) / run_id)
        try:
            run.path.mkdir(parents=True)
        except FileExistsError:
            raise RunError(f"run {run_id!r} exists at {run.path}; continue it with: sluice resume {run_id}") from None
        write_atomic(run.path / "config.json", config.model_dump_json(indent=2))
        return run

    @classmethod
    def open(cls, run: str, runs_dir: str = "runs") -> "RunDirectory":
        """Find a run by its directory or its id.

        Raises:
            RunError: There is no such run; the message lists the runs there are.
        """
        for path in (Path(run), Path(runs_dir) / run):
            if (path / "config.json").is_file():
                return cls(path)
        names = sorted(path.parent.name for path in Path(runs_dir).glob("*/config.json"))
        known = f"runs in {runs_dir}/: {', '.join(names[-5:])}" if names else f"{runs_dir}/ holds no runs"
        raise RunError(f"no run {run!r}: neither a run directory nor a run id; {known}")

    @classmethod
    def of(cls, run: RunHandle) -> "RunDirectory":
        """The directory of a run's handle."""
        return cls(Path(run.directory))

    @property
    def run_id(self) -> str:
        return self.path.name

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

    def changes(self, config: RunConfig) -> list[str]:
        """The keys by which `config` differs from the run's own.

        Raises:
            RunError: The run would train something else than was begun.
        """
        changed = changed_keys(self.config(), config)
        if refused := [key for key in changed if not key.startswith(CHANGEABLE) or key in FIXED]:
            raise RunError(
                f"run {self.run_id} can't go on with another {', '.join(refused)}: it would be another run; what may "
                f"change is {', '.join(CHANGEABLE)} (but not {', '.join(FIXED)})"
            )
        return changed

    def change_config(self, config: RunConfig) -> bool:
        """Let the run go on with `config`; returns whether it is another one than before.

        Raises:
            RunError: The run would train something else than was begun.
        """
        if changed := self.changes(config):
            write_atomic(self.path / "config.json", config.model_dump_json(indent=2))
        return bool(changed)

    @property
    def ledger(self) -> Path:
        """Where committed stage results lie: one JSON file each, under `step-<n>/`."""
        return self.path / "ledger"

    @staticmethod
    def ledger_step_name(step: int) -> str:
        """The ledger's sub-folder of one step."""
        return f"step-{step:06d}"

    def ledger_steps(self) -> list[int]:
        """The steps that the ledger holds something of."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.ledger.glob("step-*"))

    def forget_step(self, step: int) -> None:
        """Drop a step's committed stages."""
        shutil.rmtree(self.ledger / self.ledger_step_name(step), ignore_errors=True)

    def save_plan(self, step: int, plan: StepPlan) -> None:
        """Keep a step's plan beside its columns."""
        path = self._plan_path(step)
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, plan.model_dump_json())

    def plan(self, step: int) -> StepPlan | None:
        """A step's plan; None before it was made, and after its columns were cleared."""
        path = self._plan_path(step)
        return StepPlan.model_validate_json(path.read_text()) if path.exists() else None

    def forget_plan(self, step: int) -> None:
        """Drop a step's plan."""
        self._plan_path(step).unlink(missing_ok=True)

    def _plan_path(self, step: int) -> Path:
        return self.path / "plans" / f"{self.ledger_step_name(step)}.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "policy"

    @property
    def columns(self) -> Path:
        """Where durable columns lie, unless `store.url` says otherwise."""
        return self.path / "columns"

    @property
    def metrics(self) -> "MetricsFile":
        return MetricsFile(self.path / "metrics.jsonl")

    @contextmanager
    def driver_lock(self) -> Iterator[None]:
        """Hold the run: only one driver at a time. The kernel releases it when the process dies.

        Raises:
            RunError: Another process drives this run now.
        """
        with (self.path / "driver.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"run {self.run_id} is being driven by another process; stop that one first") from None
            yield

    def summary(self) -> RunSummary | None:
        """The finished run's summary; None before its end."""
        path = self.path / "summary.json"
        return RunSummary.model_validate_json(path.read_text()) if path.exists() else None

    def write_summary(self, summary: RunSummary) -> None:
        write_atomic(self.path / "summary.json", summary.model_dump_json(indent=2))


class MetricsFile:
    """`metrics.jsonl`: one line per finished step and per evaluation, in order.

    A step counts as finished when its line is here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append_step(self, report: StepReport) -> None:
        self._append({"kind": "step", **report.model_dump()})

    def append_eval(self, report: EvalReport) -> None:
        self._append({"kind": "eval", **report.model_dump()})

    def steps(self) -> list[StepReport]:
        return [StepReport.model_validate(row) for row in self._rows("step")]

    def evals(self) -> list[EvalReport]:
        return [EvalReport.model_validate(row) for row in self._rows("eval")]

    def truncate(self, num_steps: int) -> None:
        """Drop what was reported after the first `num_steps` steps: those steps will be run again."""
        kept = [{"kind": "step", **report.model_dump()} for report in self.steps() if report.step < num_steps]
        kept += [
            {"kind": "eval", **report.model_dump()} for report in self.evals() if report.policy_version <= num_steps
        ]
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def _append(self, row: dict[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _rows(self, kind: str) -> list[dict[str, object]]:
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # a line cut short by a kill was never committed
            row = json.loads(line)
            if row.pop("kind") == kind:
                rows.append(row)
        return rows


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` so that a reader or a kill sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
