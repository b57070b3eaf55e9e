"""The faults, the moments at which they strike, and a reproducible choice of both."""

import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from infra.environments.slot import PROGRAM as _PROGRAM
from infra.services.processes import process_tree
from tests.support.failing_store import BUCKET, FAILING, HAS_FAILED
from tests.support.run_results import Run
from tests.support.workplace import Command, Workplace

STEPS = 6
FAULTS_PER_RUN = 5
START_SECONDS = 15.0  # of a command, within which a fault strikes its start-up
STREAM_BYTES = 4000  # of an agent's answers, after one of which a fault strikes
STAGE_SECONDS = 0.2  # after the previous stage, within which one strikes a stage

WORKERS = {
    "rollout": "RolloutWorker",
    "policy": "PolicyWorker",
    "reference": "ReferenceWorker",
    "index": "StoreIndex",
}
PROGRAMS = {"environment": _PROGRAM, "engine": "own_engine/engine.py"}  # of rollout workers
SERVICES = {"prefect": "prefect server", "raylet": "raylet/raylet", "gcs": "gcs_server"}
KINDS = ("driver", *WORKERS, *SERVICES, "stop", "disk", "store")
ENDS_COMMAND = ("driver", "raylet", "gcs", "disk")

# What has just been done when a moment begins; None: the step before.
STAGES = {
    "rollout": None,
    "put": "rollout",
    "logprob": "put",
    "reference": "logprob",
    "advantage": "reference",
    "update": "advantage",
    "publish": "update",
}
MOMENTS = (*STAGES, "checkpoint", "clear")


class Choice(NamedTuple):
    """What is chosen from: kinds, and moments with the seconds after them in which a fault strikes."""

    kinds: Sequence[str] = KINDS
    moments: Sequence[str] = MOMENTS
    seconds: float = STAGE_SECONDS


ANY = Choice()
# Most strike while an agent has read a part of an answer.
OF_AGENTS = Choice(("environment", "driver", "rollout", "raylet"), ("stream", "stream", "stream", "rollout"), 3.0)
WITH_ENGINE = OF_AGENTS._replace(kinds=("engine", *OF_AGENTS.kinds))


class Fault(NamedTuple):
    """One fault of a run."""

    kind: str
    step: int
    moment: str
    delay: float  # seconds after the moment has begun; of a stream, the bytes of answers that an agent has read
    choice: int  # of the worker that it strikes

    def is_due(self, run: Run) -> bool:
        """Return whether its moment has begun."""
        done = run.num_done
        if self.moment == "start":
            return True
        if self.moment == "clear":
            return done > self.step
        if self.moment == "checkpoint":
            return (run.path / "policy" / f"step-{self.step + 1:06d}").exists() or done > self.step + 1
        before = STAGES.get(self.moment)
        return done >= self.step if before is None else run.passed(self.step, before)


def choose_faults(seed: int, num_faults: int, choice: Choice = ANY) -> list[list[Fault]]:
    """Return the faults of each run, in order: a function of the seed."""
    chosen, kinds, runs = random.Random(seed), list[str](), list[list[Fault]]()
    while sum(map(len, runs)) < num_faults:
        with_store = len(runs) % 2 == 1  # every other run keeps its files in the store that can fail
        steps = sorted(chosen.sample(range(STEPS), FAULTS_PER_RUN))
        faults: list[Fault] = []
        for step in steps[: num_faults - sum(map(len, runs))]:
            if not kinds:
                kinds = chosen.sample(choice.kinds, len(choice.kinds))  # each kind once, before any comes again
            kind = next((kind for kind in kinds if with_store or kind != "store"), "driver")
            if kind in kinds:
                kinds.remove(kind)
            can_start = not faults or faults[-1].kind in ENDS_COMMAND
            is_start = can_start and chosen.random() < 1 / 3
            moment = "start" if is_start else chosen.choice(choice.moments)
            delay = chosen.uniform(0, START_SECONDS if is_start else choice.seconds)
            size = chosen.randint(1, STREAM_BYTES) if moment == "stream" else round(delay, 3)
            faults.append(Fault(kind, step, moment, size, chosen.randrange(10)))
        runs.append(faults)
    return runs


def strike(fault: Fault, place: Workplace, command: Command, wait: Callable[[Callable[[], object]], object]) -> bool:
    """Let a fault happen, once what it strikes exists; return False if the command ended before, as `wait` notices."""
    if fault.moment != "stream":
        time.sleep(fault.delay)
        return _strike(fault, place, command, wait)
    folder = stops_of(place)
    (folder / "new").write_text(f"{fault.delay}")
    (folder / "new").rename(folder / "wanted")
    try:
        wait(lambda: _stopped(folder))
        return (agent := _stopped(folder)) is not None and _strike(fault, place, command, wait, agent)
    finally:
        for file in (*folder.glob("*-*"), folder / "wanted"):
            file.unlink(missing_ok=True)  # the agent goes on, if it lives


def stops_of(place: Workplace) -> Path:
    """Return the folder by which agents are asked to stop reading, and in which they note what they have read."""
    (folder := place.folder / "stops").mkdir(exist_ok=True)
    return folder


def _stopped(folder: Path) -> int | None:
    """Return the process of the agent that has stopped reading, if one has; one that was lost before is replaced."""
    for taken in folder.glob("taken-*"):
        if not psutil.pid_exists(int(taken.name.partition("-")[2])):
            taken.replace(folder / "wanted")
    return next((int(reached.name.partition("-")[2]) for reached in folder.glob("reached-*")), None)


def _strike(
    fault: Fault, place: Workplace, command: Command, wait: Callable[[Callable[[], object]], object], agent: int = 0
) -> bool:
    if fault.kind == "driver":
        is_running = command.exit_code is None
        command.kill()
        return is_running
    if fault.kind == "store":
        return _fail_requests(place, wait)
    wait(lambda: _targets(place, fault.kind))
    targets = _serving(_targets(place, fault.kind), agent)
    if targets and fault.kind != "disk":
        targets = [targets[fault.choice % len(targets)]]
    with suppress(psutil.NoSuchProcess):
        for target in targets:
            if fault.kind == "disk":  # it can't write any more, as to a full disk
                target.rlimit(psutil.RLIMIT_FSIZE, (0, target.rlimit(psutil.RLIMIT_FSIZE)[1]))
            else:
                target.send_signal(signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
    return bool(targets)


def _targets(place: Workplace, kind: str) -> list[psutil.Process]:
    """Return the processes of which a fault strikes one; a full disk strikes all."""
    if kind in SERVICES:
        return _find_service(place, kind)
    if kind in PROGRAMS:
        of_rollout = place.find_workers(WORKERS["rollout"])
        return [each for worker in of_rollout for each in _children(worker, PROGRAMS[kind])]
    roles = [WORKERS[kind]] if kind in WORKERS else WORKERS.values()
    return sorted((each for role in roles for each in place.find_workers(role)), key=lambda each: each.pid)


def _serving(targets: list[psutil.Process], agent: int) -> list[psutil.Process]:
    """Return those that serve an agent: those above it, or that one of these has started; all, if none does."""
    with suppress(psutil.NoSuchProcess):
        above = psutil.Process(agent).parents() if agent else []
        by_parents = [each for each in targets if each.parent() in above]
        return [each for each in targets if each in above] or by_parents or targets
    return targets


def _children(worker: psutil.Process, program: str) -> list[psutil.Process]:
    """Return a worker's processes that run a program."""
    with suppress(psutil.NoSuchProcess):
        return [child for child in worker.children() if any(each.endswith(program) for each in child.cmdline())]
    return []


def _find_service(place: Workplace, name: str) -> list[psutil.Process]:
    state = place.services.state("prefect" if name == "prefect" else "ray")
    found = []
    for process in process_tree(state.pid) if state else ():
        with suppress(psutil.NoSuchProcess):
            if SERVICES[name] in " ".join(process.cmdline()):
                found.append(process)
    return found


def _fail_requests(place: Workplace, wait: Callable[[Callable[[], object]], object]) -> bool:
    """Let the store fail until a request has failed, and a little longer; return whether one has."""
    failing, has_failed = (place.folder / BUCKET / name for name in (FAILING, HAS_FAILED))
    has_failed.unlink(missing_ok=True)
    failing.touch()
    wait(has_failed.exists)
    time.sleep(STAGE_SECONDS)
    failing.unlink()
    return has_failed.exists()
