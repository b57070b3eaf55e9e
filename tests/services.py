"""Running the `sluice` command as a user does: in a folder of its own, with local services of its own."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from infra.services.local import LocalServices
from infra.storage.runs import RunDirectory
from tests.tiny import make_tiny_data, make_tiny_model

CONFIG = """
name = "tiny"
steps = 4

[model]
path = "model"

[data]
train_path = "train.parquet"
eval_path = "eval.parquet"

[reward]
kind = "function"
path = "tiny_rewards:short"

[rollout]
num_prompts = 4
samples_per_prompt = 4
max_response_tokens = 12

[kl]
coef = 0.01

[optim]
lr = 1e-2

[runtime]
num_threads = 1
"""

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

    @property
    def services(self) -> LocalServices:
        return LocalServices(self.folder / ".sluice")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a `sluice` command and go on."""
        return self._spawn("-m", "flows.cli.main", *arguments)

    def sluice(self, *arguments: str, exit_code: int = 0) -> str:
        """Run a `sluice` command to its end; returns what it printed."""
        return self.python("-m", "flows.cli.main", *arguments, exit_code=exit_code)

    def python(self, *arguments: str, exit_code: int = 0, timeout: float = 240) -> str:
        """Run Python to its end; returns what it printed, standard error last."""
        process = self._spawn(*arguments)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
        assert process.returncode == exit_code, f"exit {process.returncode}\n{out}\n{err}"
        return out + err

    def _spawn(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill_when(self, reached: Callable[[], bool], *arguments: str) -> None:
        """Start a command and kill it, -9, as soon as `reached` says so."""
        process = self.start(*arguments)
        self.wait_for(reached, process)
        self.kill(process)

    def kill(self, process: subprocess.Popen[str]) -> str:
        """Kill -9 a command; what it started goes on. Returns what it had printed."""
        process.send_signal(signal.SIGKILL)
        return "".join(process.communicate())

    def wait_for(self, reached: Callable[[], bool], process: subprocess.Popen[str], timeout: float = 120) -> None:
        """Wait until `reached` says so, while `process` runs."""
        deadline = time.monotonic() + timeout
        while not reached():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "the awaited moment never came"
            time.sleep(0.002)

    def committed(self, run_id: str, step: int, stage: str) -> Callable[[], bool]:
        """Whether the run's ledger holds a stage of a step, whole: Prefect writes an entry in place."""
        folder = self.folder / "runs" / run_id / "ledger" / f"step-{step:06d}"

        def committed() -> bool:
            try:
                return any(json.loads(entry.read_text()) for entry in folder.glob(f"{stage}-*"))
            except (FileNotFoundError, json.JSONDecodeError):
                return False

        return committed

    def weights(self, run_id: str, version: int) -> str:
        """The digest of a checkpoint's weights and optimizer state."""
        folder = self.folder / "runs" / run_id / "policy" / f"step-{version:06d}"
        shards = sorted(folder.glob("rank-*.safetensors"))
        assert shards, f"{folder} holds no checkpoint"
        return hashlib.sha256(b"".join(shard.read_bytes() for shard in shards)).hexdigest()

    def metrics(self, run_id: str) -> list[dict[str, float]]:
        """What each step measured, without its times."""
        reports = self._run(run_id).metrics.steps()
        return [
            {name: value for name, value in report.metrics.items() if not name.endswith("_seconds")}
            for report in reports
        ]

    def sampling_seconds(self, run_id: str) -> list[float]:
        """How long each step's sampling took, when it was done."""
        return [report.metrics["rollout/generate_seconds"] for report in self._run(run_id).metrics.steps()]

    def store_bytes_at_end(self, run_id: str) -> int:
        """What the column store held when the run ended."""
        summary = self._run(run_id).summary()
        assert summary is not None
        return summary.store_bytes_at_end

    def steps_done(self, run_id: str) -> int:
        return len(self._run(run_id).metrics.steps())

    def ledger(self, run_id: str, step: int) -> dict[str, int]:
        """A step's ledger entries, by name, and when each was written."""
        folder = self._run(run_id).ledger.path / f"step-{step:06d}"
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("*") if path.exists()}

    def kill_worker(self, role: str, at_most: int | None = None) -> int:
        """Kill -9 the Ray worker processes of one class, e.g. `PolicyWorker`; returns how many."""
        workers = [process for name, process in self._workers() if name.startswith(role)][:at_most]
        for worker in workers:
            worker.kill()
        return len(workers)

    def worker_names(self) -> list[str]:
        """What Ray calls its worker processes."""
        return [name for name, _ in self._workers()]

    def _workers(self) -> list[tuple[str, psutil.Process]]:
        state = self.services.state("ray")
        assert state is not None
        named = []
        for process in psutil.Process(state.pid).children(recursive=True):
            try:
                title = "".join(process.cmdline()[:1])
            except psutil.NoSuchProcess:
                continue
            if title.startswith("ray::"):
                named.append((title.removeprefix("ray::"), process))
        return named

    def stop_ray(self) -> None:
        """End the local Ray with all that it holds."""
        state = self.services.state("ray")
        assert state is not None
        processes = [psutil.Process(state.pid), *psutil.Process(state.pid).children(recursive=True)]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=30)

    def _run(self, run_id: str) -> RunDirectory:
        return RunDirectory(self.folder / "runs" / run_id)

    def _environment(self) -> dict[str, str]:
        # Nothing of the caller's configuration may reach the commands: each workplace starts its own services.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "RAY_"))}
        root = str(Path(__file__).parents[1])
        return {**kept, "PYTHONPATH": root, "COLUMNS": "200"}
