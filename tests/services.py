"""Running the `sluice` command as a user does: in a folder of its own, with local services of its own."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from infra.services.local import LocalServices, process_tree
from infra.storage.runs import RunDirectory
from infra.storage.step_folders import step_folder
from tests.configs import config_toml
from tests.progress import MIN_POLL_SECONDS, Progress, wait_until
from tests.tiny import make_tiny_data, make_tiny_model

CONFIG = config_toml(
    name="tiny",
    data={"eval_path": "eval.parquet"},
    reward={"kind": "function", "path": "tiny_rewards:short"},
    rollout={"num_prompts": 4, "samples_per_prompt": 4, "max_response_tokens": 12},
    kl={"coef": 0.01},
    optim={"lr": 1e-2},
)

REWARDS = '''
def short(prompt, completion, answer, info):
    """The fewer vowels the better: any model can learn that."""
    return 1 - sum(completion.count(vowel) for vowel in "aeiou") / 12

def sometimes(prompt, completion, answer, info):
    if int(answer) % 2:
        raise RuntimeError("no opinion on odd answers")
    return short(prompt, completion, answer, info)
'''


class Workplace:
    """A folder with a tiny model, data, rewards and a config, in which `sluice` commands run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_tiny_model(folder / "model")
        make_tiny_data(folder / "train.parquet", 12)
        make_tiny_data(folder / "eval.parquet", 4)
        (folder / "tiny.toml").write_text(CONFIG)
        (folder / "tiny_rewards.py").write_text(REWARDS)
        for package in ("schemas", "rl_core", "infra", "tasks", "flows"):  # a user's own modules don't shadow Sluice's
            (folder / f"{package}.py").write_text("raise ImportError('a user module shadows Sluice')\n")

    @property
    def services(self) -> LocalServices:
        return LocalServices(self.folder / ".sluice")

    def start(self, *arguments: str) -> "Command":
        """Start a `sluice` command."""
        return Command(self, "-P", "-m", "flows.cli.main", *arguments)

    def sluice(self, *arguments: str, exit_code: int = 0) -> str:
        """Run a `sluice` command to its end; return what it printed."""
        return self.start(*arguments).finish(exit_code)

    def python(self, *arguments: str, exit_code: int = 0) -> str:
        """Run Python to its end; return what it printed, standard error last."""
        return Command(self, *arguments).finish(exit_code)

    def run(self, run_id: str) -> "Run":
        """Return what a run has written so far."""
        return Run(self.folder / "runs" / run_id)

    def kill_worker(self, role: str, at_most: int | None = None) -> int:
        """Kill -9 the Ray worker processes of one class, e.g. `PolicyWorker`; return how many."""
        workers = [process for name, process in self._workers() if name.startswith(role)][:at_most]
        for worker in workers:
            worker.kill()
        return len(workers)

    def worker_names(self) -> list[str]:
        """Return Ray's names of its worker processes."""
        return [name for name, _ in self._workers()]

    def worker_processes(self) -> list[psutil.Process]:
        """Return Ray's worker processes."""
        return [process for _, process in self._workers()]

    def service_processes(self) -> list[psutil.Process]:
        """Return the local services' processes, with all that they have started."""
        states = (self.services.state(name) for name in ("prefect", "ray"))
        return [process for state in states if state for process in process_tree(state.pid)]

    def stop_ray(self) -> None:
        """Kill the local Ray with all that it holds."""
        state = self.services.state("ray")
        assert state is not None
        processes = process_tree(state.pid)
        for process in processes:
            process.kill()
        psutil.wait_procs(processes)

    def _workers(self) -> Iterator[tuple[str, psutil.Process]]:
        state = self.services.state("ray")
        for process in process_tree(state.pid) if state else ():
            try:
                title = "".join(process.cmdline()[:1])
            except psutil.NoSuchProcess:
                continue
            if title.startswith("ray::"):
                yield title.removeprefix("ray::"), process


class Command:
    """A running command of a workplace."""

    def __init__(self, place: Workplace, *arguments: str) -> None:
        self._place = place
        self._out, self._err = (_new_file(place.folder / ".output", suffix) for suffix in ("out", "err"))
        # Nothing of the caller's configuration may reach the command: each workplace starts its own services.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "RAY_"))}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=place.folder,
                env={**kept, "PYTHONPATH": str(Path(__file__).parents[1]), "COLUMNS": "200"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self._progress = Progress(self._working, self._written, services=place.service_processes)

    @property
    def printed(self) -> str:
        """Return what it has printed so far, standard error last."""
        return self._out.read_text() + self._err.read_text()

    @property
    def errors(self) -> str:
        """Return what it has printed to standard error so far."""
        return self._err.read_text()

    def wait_for(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached` returns true, while the command runs."""

        def reached_while_running() -> bool:
            if reached():
                return True
            assert self._process.poll() is None, self.printed
            return False

        wait_until(reached_while_running, self._progress, MIN_POLL_SECONDS)  # what is reached may pass again

    def finish(self, exit_code: int = 0) -> str:
        """Wait for its end; return what it printed, standard error last."""
        try:
            wait_until(lambda: self._process.poll() is not None, self._progress)
        finally:
            self._process.kill()
        assert self._process.wait() == exit_code, f"exit {self._process.returncode}\n{self.printed}"
        return self.printed

    def kill(self) -> str:
        """Kill -9 it; what it started continues. Return what it had printed."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        return self.printed

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._process.terminate()

    def _working(self) -> list[psutil.Process]:
        """Return the processes that work for it: itself, its children and Ray's workers, but no service."""
        states = (self._place.services.state(name) for name in ("prefect", "ray"))
        services = {state.pid for state in states if state}
        own: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            own.append(psutil.Process(self._process.pid))
            own += own[0].children()
        return [process for process in own if process.pid not in services] + self._place.worker_processes()

    def _written(self) -> object:
        runs = (self._place.folder / "runs").glob("*/metrics.jsonl")
        return [path.stat().st_size for path in (self._out, self._err, *runs)]


class Run(RunDirectory):
    """The results of a run, as tests compare them."""

    def committed(self, step: int, stage: str) -> bool:
        """Return whether the ledger holds a stage of a step, whole: Prefect writes an entry in place."""
        try:
            return any(json.loads(entry.read_text()) for entry in self.step_ledger(step).glob(f"{stage}-*"))
        except (FileNotFoundError, json.JSONDecodeError):
            return False

    def passed(self, step: int, stage: str) -> bool:
        """Return whether a stage of a step is committed, or the whole step is done: its ledger may be dropped then."""
        return self.committed(step, stage) or len(self.metrics.steps()) > step

    def entries(self, step: int) -> dict[str, int]:
        """Return when each of a step's ledger entries was written, by name."""
        return {path.name: path.stat().st_mtime_ns for path in self.step_ledger(step).glob("*") if path.exists()}

    def step_ledger(self, step: int) -> Path:
        return self.ledger.path / step_folder(step)

    def weights(self, version: int) -> str:
        """Return the digest of a checkpoint's weights and optimizer state."""
        folder = self.checkpoints / f"step-{version:06d}"
        shards = sorted(folder.glob("rank-*.safetensors"))
        assert shards, f"{folder} holds no checkpoint"
        return hashlib.sha256(b"".join(shard.read_bytes() for shard in shards)).hexdigest()

    def step_metrics(self) -> list[dict[str, float]]:
        """Return each step's metrics, without times."""
        return [
            {name: value for name, value in report.metrics.items() if not name.endswith("_seconds")}
            for report in self.metrics.steps()
        ]

    def generate_seconds(self) -> list[float]:
        """Return how long each step's rollout took when it was generated."""
        return [report.metrics["rollout/generate_seconds"] for report in self.metrics.steps()]

    def store_bytes_at_end(self) -> int:
        """Return what the column store held when the run ended."""
        summary = self.summary()
        assert summary is not None
        return summary.store_bytes_at_end


def _new_file(folder: Path, suffix: str) -> Path:
    folder.mkdir(exist_ok=True)
    return folder / f"{len(list(folder.iterdir()))}.{suffix}"
