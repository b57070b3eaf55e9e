"""Running the `sluice` command as a user does: in a folder of its own, with local services of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
from prefect.client.orchestration import PrefectClient

from infra.services.local import LocalServices, ServiceState, free_port
from infra.services.processes import process_tree
from tests.support.configs import config_toml
from tests.support.ended import note_ended
from tests.support.progress import MIN_POLL_SECONDS, STILL_SECONDS, Progress, wait_until
from tests.support.run_results import Run
from tests.support.tiny import make_tiny_data, make_tiny_model

Answer = TypeVar("Answer")

SLICE_SECONDS = 0.01  # much less than a step of a tiny model, which takes a tenth of a second

CONFIG = config_toml(
    name="tiny",
    data={"eval_path": "eval.parquet"},
    reward={"kind": "function", "path": "tiny_rewards:short"},
    rollout={"num_prompts": 4, "samples_per_prompt": 4, "max_response_tokens": 12},
    optim={"lr": 1e-2},
)

WITH_REFERENCE = CONFIG + "kl.coef = 0.01\n"

REWARDS = '''
import pathlib, time

def short(prompt, completion, answer, info):
    """The fewer vowels the better: any model can learn that."""
    return 1 - sum(completion.count(vowel) for vowel in "aeiou") / 12

def switched(prompt, completion, answer, info):
    while pathlib.Path("hold").exists():
        time.sleep(0.05)
    return 0.0 if pathlib.Path("collapse").exists() else short(prompt, completion, answer, info)

def sometimes(prompt, completion, answer, info):
    if int(answer) % 2:
        raise RuntimeError("no opinion on odd answers")
    return short(prompt, completion, answer, info)
'''


SLUICE = ("-P", "-m", "flows.cli.main")  # the arguments with which Python is the `sluice` command
OF_RAY = ("IDLE", "Dashboard", "RuntimeEnv")
# Beginnings of the variables that a command doesn't inherit: it sets its own, and starts its own services.
OF_CALLER = ("PREFECT_", "RAY_", "OMP_", "REPORTER_")


class Workplace:
    """A folder with a tiny model, data, rewards and a config, in which `sluice` commands run."""

    def __init__(self, folder: Path, *, config: str = CONFIG) -> None:
        self.folder = folder
        self.still_seconds = STILL_SECONDS  # without progress of a command that make a deadlock
        self._runner, self._asked = asyncio.Runner(), ""
        self._run_ids: dict[str, str] = {}  # of the runs started here, with the test file that started each
        self.environment: dict[str, str] = {}  # of its commands, besides the caller's; PYTHONPATH is extended
        make_tiny_model(folder / "model")
        make_tiny_data(folder / "train.parquet", 12)
        make_tiny_data(folder / "eval.parquet", 4)
        (folder / "tiny.toml").write_text(config)
        (folder / "tiny_rewards.py").write_text(REWARDS)
        for package in ("schemas", "rl_core", "infra", "tasks", "flows"):  # a user's own modules don't shadow Sluice's
            (folder / f"{package}.py").write_text("raise ImportError('a user module shadows Sluice')\n")

    def choose_port(self) -> None:
        """Record a port as that of an ended Prefect server: the usual one is taken while a killed server is down."""
        ended = ServiceState(pid=os.getpid(), started="before", port=free_port(), is_ready=False)
        self.services.directory.mkdir(parents=True)
        (self.services.directory / "prefect.json").write_text(ended.model_dump_json())

    @property
    def services(self) -> LocalServices:
        return LocalServices(self.folder / ".sluice")

    def close(self) -> None:
        """Stop the services."""
        if self._asked:
            self._runner.run(self._client.__aexit__(None, None, None))
        self._runner.close()
        self.services.stop()

    def start(self, *arguments: str) -> "Command":
        """Start a `sluice` command."""
        if "--run-id" in arguments:  # a workplace is shared: another file's run would look like this one's progress
            run_id = arguments[arguments.index("--run-id") + 1]
            file = os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[0]
            assert self._run_ids.setdefault(run_id, file) == file, f"{run_id} is a run of {self._run_ids[run_id]}"
        return Command(self, *SLUICE, *arguments)

    def sluice(self, *arguments: str, exit_code: int = 0) -> str:
        """Run a `sluice` command to its end; return what it printed."""
        return self.start(*arguments).finish(exit_code)

    def python(self, *arguments: str, exit_code: int = 0) -> str:
        """Run Python to its end; return what it printed, standard error last."""
        return Command(self, *arguments).finish(exit_code)

    def prefect(
        self, *arguments: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> "Command":
        """Start a `prefect` command that uses the workplace's server."""
        api_url = self.services.prefect_api_url
        assert api_url is not None
        own = {"PREFECT_API_URL": api_url, "PYTHONSAFEPATH": "1", **(environment or {})}
        return Command(self, "-m", "prefect", *arguments, cwd=cwd, environment=own)

    def ask(self, question: Callable[[PrefectClient], Awaitable[Answer]]) -> Answer:
        """Ask the workplace's Prefect server."""
        api_url = self.services.prefect_api_url
        assert api_url is not None
        if self._asked != api_url:  # a client takes longer to make than most answers
            self._client = PrefectClient(api_url)
            self._runner.run(self._client.__aenter__())
            self._asked = api_url

        async def ask() -> Answer:
            return await question(self._client)

        return self._runner.run(ask())

    def run(self, run_id: str) -> "Run":
        """Return what a run has written so far."""
        return Run(self.folder / "runs" / run_id)

    def kill_worker(self, role: str, at_most: int | None = None) -> int:
        """Kill -9 the Ray worker processes of one class, e.g. `PolicyWorker`; return how many."""
        workers = self.find_workers(role)[:at_most]
        for worker in workers:
            worker.kill()
        return len(workers)

    def find_workers(self, role: str) -> list[psutil.Process]:
        """Return the Ray worker processes of one class."""
        return [process for name, process in self._workers() if name.startswith(role)]

    def worker_names(self) -> list[str]:
        """Return Ray's names of its worker processes, without those that serve Ray itself."""
        return [name for name, _ in self._workers() if not name.startswith(OF_RAY)]

    def worker_processes(self) -> list[psutil.Process]:
        """Return Ray's worker processes."""
        return [process for _, process in self._workers()]

    def model_workers(self) -> list[psutil.Process]:
        """Return the Ray worker processes that hold a model."""
        return [process for name, process in self._workers() if "Worker" in name]

    def wait_for_no_workers(self) -> None:
        """Wait until no process holds a model: Ray frees a killed worker's name before its process has ended."""
        wait_until(lambda: not self.model_workers())

    def service_processes(self) -> list[psutil.Process]:
        """Return the local services' processes, with all that they have started."""
        states = (self.services.state(name) for name in ("prefect", "ray"))
        return [process for state in states if state for process in process_tree(state.pid)]

    def stop_ray(self) -> None:
        """Kill the local Ray with all that it holds."""
        self.kill_service("ray")

    def kill_service(self, name: str) -> None:
        """Kill -9 a local service with all that it has started."""
        state = self.services.state(name)
        assert state is not None
        processes = process_tree(state.pid)
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                process.kill()
        psutil.wait_procs(processes)

    def _workers(self) -> Iterator[tuple[str, psutil.Process]]:
        state = self.services.state("ray")
        return ray_workers_in(process_tree(state.pid) if state else ())


class Command:
    """A running command of a workplace."""

    def __init__(
        self, place: Workplace, *arguments: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._place, self._arguments = place, arguments
        self._out, self._err = (_new_file(place.folder / ".output", suffix) for suffix in ("out", "err"))
        path = [str(Path(__file__).parents[2]), *filter(None, [place.environment.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(path), "COLUMNS": "200"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_CALLER)}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=cwd or place.folder,
                env=kept | place.environment | own | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self._progress = Progress(self._working, self._written, place.still_seconds, services=place.service_processes)

    @property
    def printed(self) -> str:
        """Return what it has printed so far, standard error last."""
        return self._out.read_text() + self._err.read_text()

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    @property
    def errors(self) -> str:
        """Return what it has printed to standard error so far."""
        return self._err.read_text()

    def wait_for(self, reached: Callable[[], bool], poll_seconds: float = MIN_POLL_SECONDS) -> None:
        """Wait until `reached` returns true, while the command runs."""

        def reached_while_running() -> bool:
            has_ended = self.exit_code is not None  # asked first: it may reach it, and end, in between
            if reached():
                return True
            assert not has_ended, self.printed
            return False

        wait_until(reached_while_running, self._progress, poll_seconds)  # what is reached may pass again

    def wait_standing(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached` returns true, and leave the command's process standing there, until `resume` or `kill`.

        As soon as it has printed something, it goes on for `SLICE_SECONDS` at a time, and stands while `reached` is
        asked: hardly anything passes unseen. What it has started, such as Ray's workers, goes on.
        """
        self.wait_for(lambda: bool(self.printed))  # the UI's address: it has imported all, and its services are there

        def stands() -> bool:
            self.resume()
            time.sleep(SLICE_SECONDS)
            self.suspend()
            return self.exit_code is None and reached()

        try:
            self.wait_for(stands, poll_seconds=0)
        except BaseException:
            self.kill()
            raise

    def suspend(self) -> None:
        """Have its process stand; what it has started goes on."""
        self._process.send_signal(signal.SIGSTOP)
        with suppress(ChildProcessError):  # it has ended
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # until all threads stand

    def resume(self) -> None:
        """Have its process go on."""
        self._process.send_signal(signal.SIGCONT)

    def finish(self, exit_code: int = 0) -> str:
        """Wait for its end; return what it printed, standard error last."""
        try:
            wait_until(lambda: self._process.poll() is not None, self._progress)
        finally:
            self._process.kill()
        assert self._process.wait() == exit_code, f"exit {self._process.returncode}\n{self.printed}"
        if exit_code == 0 and self._arguments[: len(SLUICE)] == SLUICE:
            note_ended(self._arguments[len(SLUICE) :])
        return self.printed

    def kill(self) -> str:
        """Kill -9 it; what it started continues. Return what it had printed."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        return self.printed

    @property
    def processes(self) -> list[psutil.Process]:
        """Return its process and all that it has started."""
        return process_tree(self._process.pid)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._process.terminate()

    def interrupt(self) -> None:
        """Send it SIGINT, as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def _working(self) -> list[psutil.Process]:
        """Return the processes that work for it: itself, its children and Ray's workers, but no service.

        The workers may be of the local Ray or of a cluster that the test has started.
        """
        states = (self._place.services.state(name) for name in ("prefect", "ray"))
        services = {state.pid for state in states if state}
        own: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            own.append(psutil.Process(self._process.pid))
            own += own[0].children()
        clusters = ray_workers_in(psutil.Process().children(recursive=True))
        workers = [*self._place.worker_processes(), *(process for _, process in clusters)]
        return [process for process in own if process.pid not in services] + workers

    def _written(self) -> object:
        runs = (self._place.folder / "runs").glob("*/metrics.jsonl")
        return [path.stat().st_size for path in (self._out, self._err, *runs)]


def ray_workers_in(processes: Iterable[psutil.Process]) -> Iterator[tuple[str, psutil.Process]]:
    """Yield those of some processes that are Ray workers, each after Ray's name of it."""
    for process in processes:
        try:
            title = "".join(process.cmdline()[:1])
        except psutil.NoSuchProcess:
            continue
        if title.startswith("ray::"):
            yield title.removeprefix("ray::"), process


def _new_file(folder: Path, suffix: str) -> Path:
    folder.mkdir(exist_ok=True)
    return folder / f"{len(list(folder.iterdir()))}.{suffix}"
