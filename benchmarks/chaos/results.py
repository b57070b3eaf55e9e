"""What a run has left: compared with the undisturbed run's, and searched for leaks."""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.chaos.faults import STEPS
from infra.checkpoints.store import open_checkpoints
from tests.support.failing_store import BUCKET
from tests.support.run_results import Run
from tests.support.workplace import Workplace

NOT_LEFT_OVER = ("driver.log", "driver.lock", "identity.json")  # the last also says whose a folder at a URL is


class Results(NamedTuple):
    """What must be the same in every run, and the files that it has left."""

    weights: str
    metrics: list[dict[str, float]]
    evaluations: list[dict[str, Any]]
    columns: list[str]  # the digest of each step's rows: prompts, responses, log-probs, rewards, in their order
    num_updates: int
    files: dict[str, int]  # bytes by name


def read_results(place: Workplace, run: Run) -> Results:
    """Read what a finished run has left."""
    config = run.config()
    steps = [hashlib.sha256(str(rows).encode()).hexdigest() for rows in run.stored_rows(STEPS)]
    manifest = open_checkpoints(run, config.checkpoint).verify(STEPS)
    evaluations = [report.model_dump(exclude={"seconds"}) for report in run.metrics.evals()]
    weights = {name: entry.checksum for name, entry in manifest.files.items() if name.startswith("rank-")}
    return Results(
        str(sorted(weights.items())), run.step_metrics(), evaluations, steps, manifest.num_updates, _files(place, run)
    )


def leaked_files(results: Results, expected: Results) -> dict[str, int]:
    """Return the bytes of the files that the undisturbed run hasn't left, by name."""
    return {name: size for name, size in results.files.items() if name not in expected.files}


def leaked_processes(place: Workplace) -> list[str]:
    """Return the workers that still exist after a run's end, and what runs in its folder but is no service of it."""
    services, others = {process.pid for process in place.service_processes()}, list[str]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended
            if Path(process.cwd()) == place.folder and process.pid not in services:
                others.append(" ".join(process.cmdline()))
    return place.worker_names() + others


def _files(place: Workplace, run: Run) -> dict[str, int]:
    """Return the sizes of a run's files, by names that don't depend on where they are kept."""
    bucket = place.folder / BUCKET
    roots = {"": run.path, "columns/": bucket / "columns" / run.run_id, "policy/": bucket / "policy" / run.run_id}
    found = {f"{prefix}{path.relative_to(root)}": path for prefix, root in roots.items() for path in root.rglob("*")}
    return {
        name: path.stat().st_size for name, path in found.items() if path.is_file() and path.name not in NOT_LEFT_OVER
    }
