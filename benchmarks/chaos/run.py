"""The campaign: an undisturbed run, then runs with faults, resumed until they end."""

import json
import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event, Thread
from typing import Any

from rich.console import Group

from benchmarks.chaos.faults import ANY, OF_AGENTS, STEPS, WITH_ENGINE, Choice, Fault, choose_faults, stops_of, strike
from benchmarks.chaos.results import Results, leaked_files, leaked_processes, read_results
from benchmarks.command import Benchmark, Report, option, table, temporary_place
from schemas.errors import ConfigError
from tests.support.failing_store import BUCKET, PROTOCOL, install
from tests.support.progress import Deadlock
from tests.support.run_results import Run, count_turns
from tests.support.workplace import Command, Workplace

UNDISTURBED = "chaos-undisturbed"
MAX_RESUMES = 20  # of one run
STILL_SECONDS = 300.0  # without progress: a hang; a worker that is stopped while it starts is noticed before
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", f"store.keep_steps={STEPS}", "checkpoint.every_steps=2"),
    *("timeouts.worker_seconds=40", "loss.behavior=recompute"),  # all stages
)
FAULTLESS = (  # 0 in a good report
    *("updates_applied_twice", "turns_sampled_twice", "trajectories_restarted"),
    *("leaked_bytes", "leaked_processes", "hangs", "tracebacks"),
)
TURNS = ("turns", "turns_received", "turns_recorded", "turns_recorded_again")
WORKERS = ("runtime.num_policy_ranks=2", "rollout.num_workers=2")
AGENT = Path(__file__).parent / "agent.py"
ENGINE = Path(__file__).parents[2] / "examples" / "own_engine" / "engine.py"
# A limit that is reached on a busy machine would be one more fault.
LIMITS = "reset_timeout_seconds=300, step_timeout_seconds=300"
CLIENTS = ("completions", "messages")  # of agents
LIBRARIES = ("openai", "anthropic", "langchain", "pydantic_ai", "openai_agents")  # which these use
AGENTS = (
    *('reward={kind="environment"}', "rollout.max_response_tokens=200", "packing.token_budget=800"),
    f"rollout.stop_token_ids={[*range(40), 259]}",  # a tiny model rarely ends a turn itself
)
PROGRAM = ("rollout.kind=program", f"rollout.program={ENGINE}", f"rollout.python={sys.executable}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """The settings of a campaign."""

    kills: int = option(10, "faults")
    seed: int = option(0, "seed of the faults and their moments")
    agents: bool = option(False, "whether rows are trajectories of agents, whose environment processes are killed, too")
    python: str = option("", "an interpreter with the libraries of agents, over which they ask, too")
    engine: bool = option(False, "whether a program samples for agents, examples/own_engine, which is killed, too")


def measure(plan: Plan) -> Report:
    """Disturb real runs at random moments, resume them, and compare them with an undisturbed run."""
    if not plan.agents and (plan.python or plan.engine):
        raise ConfigError("--python and --engine are for runs with agents; add --agents, or leave them out")
    with temporary_place(Workplace) as place:
        if not plan.agents:
            return disturb(place, plan.kills, plan.seed)
        python, clients = str(Path(plan.python).absolute()) if plan.python else "{python}", CLIENTS
        clients += LIBRARIES if plan.python else ()
        command = json.dumps([python, str(AGENT), str(stops_of(place)), *clients])
        environment = f'environment={{kind="program", command={command}, max_turn_tokens=8, {LIMITS}}}'
        options = [*WORKERS, *(PROGRAM if plan.engine else ()), environment, *AGENTS]
        return disturb(place, plan.kills, plan.seed, options, WITH_ENGINE if plan.engine else OF_AGENTS)


def disturb(
    place: Workplace, num_faults: int, seed: int, options: Sequence[str] = WORKERS, choice: Choice = ANY
) -> Report:
    """Run in a new folder, with faults of this seed and choice, until so many have struck; options change the config.

    Returns:
        `kills`, `resumes`, `identical`, what is 0 in a good report (`FAULTLESS`), of agents the turns of `count_turns`
        and those received by agents, each time, and in `faults` each fault with its moment, its run and its outcome.
    """
    place.environment["PYTHONPATH"] = str(install(place.folder))
    place.still_seconds = STILL_SECONDS
    place.sluice(*CONFIG, *options, "--run-id", UNDISTURBED)
    expected, known = read_results(place, place.run(UNDISTURBED)), set(_received(place))
    totals: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    identical, number = True, 0
    planned = choose_faults(seed, num_faults, choice)
    while totals["kills"] < num_faults:
        missed = num_faults - totals["kills"]
        plan = planned[number] if number < len(planned) else choose_faults(seed + number, missed, choice)[0]
        campaign = _Run(place, f"chaos-{number}", [*options, *(_store_options(place) if number % 2 else [])])
        campaign.go(plan[:missed])
        results = read_results(place, campaign.run)
        differing = [name for name in _COMPARED if getattr(results, name) != getattr(expected, name)]
        received = _received(place)
        rows, log = chain(*campaign.run.stored_rows(STEPS)), (campaign.run.path / "driver.log").read_text()
        totals += campaign.counts + count_turns(campaign.journals.iterdir(), rows, log)
        totals["turns_received"] += len(received)
        totals["turns_sampled_twice"] += len(set(received) - known)
        restarted = [report.telemetry.get("turns/restarted", 0) for report in campaign.run.metrics.steps()]
        totals["trajectories_restarted"] += int(sum(restarted))
        totals["updates_applied_twice"] += max(0, results.num_updates - expected.num_updates)
        files, leaked = leaked_files(results, expected), leaked_processes(place)
        totals["leaked_bytes"] += campaign.run.store_bytes_at_end() + sum(files.values())
        totals["leaked_processes"] += len(leaked)
        identical = identical and not differing
        faults += campaign.faults
        logger.info("%s: %d faults, %s", campaign.run.run_id, len(campaign.faults), differing or "identical")
        if differing:
            logger.warning("%s is kept in %s", campaign.run.run_id, _keep(place, campaign.run))
        for left in (*files.items(), *leaked):
            logger.warning("%s left a file, of so many bytes, or a process: %s", campaign.run.run_id, left)
        number += 1
    counted = {name: totals[name] for name in ("kills", "resumes", *FAULTLESS, *TURNS)}
    return {**counted, "identical": identical, "seed": seed, "faults": faults}


def is_passed(report: Report) -> bool:
    """Return whether every run of a report ended as the undisturbed one, left nothing over and printed no traceback."""
    return report["identical"] and not any(report[name] for name in FAULTLESS)


def render(report: Report) -> Group:
    """Return the report as a table of faults, and totals."""
    rows = {
        f"{number}: {fault['run']}": {
            **{name: fault[name] for name in ("kind", "step", "moment", "delay")},
            "the run": "stopped, and was resumed" if fault["stopped"] else "went on",
        }
        for number, fault in enumerate(report["faults"], 1)
    }
    return table("faults", rows, [f"{name}: {value}" for name, value in report.items() if name != "faults"])


_COMPARED = [name for name in Results._fields if name != "files"]


class _Run:
    """One run with faults, and the commands that start and resume it."""

    def __init__(self, place: Workplace, run_id: str, options: Sequence[str]) -> None:
        self.run, self.counts, self.faults = place.run(run_id), Counter[str](), list[dict[str, Any]]()
        self._place = place
        self.journals = Path(tempfile.mkdtemp(prefix=f"{run_id}-", dir=place.folder))
        self._arguments = (*CONFIG, "--run-id", run_id, *options)
        self._command = place.start(*self._arguments)

    def go(self, plan: list[Fault]) -> None:
        """Let the faults strike, one after another, and resume the run until it ends."""
        Thread(target=self.run.keep_journals, args=(self.journals, has_ended := Event()), daemon=True).start()
        for fault in plan:
            if not self._strike(fault):
                break
            self.counts["kills"] += 1
            self.faults.append({"run": self.run.run_id, **fault._asdict(), "stopped": False})
            logger.info("%d: %s", self.counts["kills"], self.faults[-1])
        else:
            self._wait(lambda: False)
        has_ended.set()

    def _strike(self, fault: Fault) -> bool:
        """Let a fault strike a running command; return False if the run ended before."""
        while self._wait(partial(fault.is_due, self.run)):
            if strike(fault, self._place, self._command, self._wait_for_command):
                return True
        return False

    def _wait(self, reached: Callable[[], object]) -> bool:
        """Wait until a running command has reached something; resume the run if it stops; return False if it ended."""
        while not self._wait_for_command(reached) or self._command.exit_code is not None:
            if self._command.exit_code == 0:
                self._count_tracebacks(self._command)
                return False
            self._resume()
        return True

    def _wait_for_command(self, reached: Callable[[], object]) -> bool:
        """Wait until something is reached, or the command ends; return whether it was reached."""
        try:
            self._command.wait_for(lambda: bool(reached()) or self._command.exit_code is not None)
        except Deadlock:
            self.counts["hangs"] += 1
            self._command.kill()
            return False
        return bool(reached())

    def _resume(self) -> None:
        self.counts["resumes"] += 1
        assert self.counts["resumes"] <= MAX_RESUMES, f"{self.run.run_id} does not end:\n{self._command.printed}"
        self._count_tracebacks(self._command)
        if self.faults:
            self.faults[-1] |= {"stopped": True, "last_line": (self._command.printed.strip().splitlines() or [""])[-1]}
        is_made = (self.run.path / "config.json").exists()
        self._command = self._place.start(*(("resume", self.run.run_id) if is_made else self._arguments))

    def _count_tracebacks(self, command: Command) -> None:
        if found := command.printed.count("Traceback"):
            logger.warning("%s printed a traceback:\n%s", self.run.run_id, command.printed)
            self.counts["tracebacks"] += found


def _store_options(place: Workplace) -> list[str]:
    """Return the options of a run that keeps columns and checkpoints in the store that can fail."""
    folders = {"store": "columns", "checkpoint": "policy"}
    return [f"{name}.url={PROTOCOL}://{place.folder / BUCKET / folder}" for name, folder in folders.items()]


def _received(place: Workplace) -> list[str]:
    """Take what agents have noted of the turns that they have received."""
    (file := stops_of(place) / "received").touch()
    lines = file.read_text().splitlines()
    file.unlink()
    return lines


def _keep(place: Workplace, run: Run) -> Path:
    """Copy what a run and the undisturbed one have left, as the workplace is removed; return the folder."""
    kept = Path(tempfile.mkdtemp(prefix=f"sluice-{run.run_id}-"))
    for each in (run, place.run(UNDISTURBED)):
        shutil.copytree(each.path, kept / each.run_id)
    if (place.folder / BUCKET).exists():
        shutil.copytree(place.folder / BUCKET, kept / BUCKET)
    return kept


BENCHMARK = Benchmark(Plan(), Plan(kills=1), measure, render, is_passed)
