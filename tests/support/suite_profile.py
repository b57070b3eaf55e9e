"""Where the time of the tests goes: the processor time of everything that a command starts, by kind of process.

`python -m tests.support.suite_profile make test` runs a command, looks twice a second at all that it has started, which
it knows by a variable of their environment, and prints a table. A process that lives for less than that may be missed.
"""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import psutil

POLL_SECONDS = 0.5
MARK = "SUITE_PROFILE"  # the variable: processes whose parent has ended are still known by it
RAY_PARTS = ("raylet", "gcs_server", "ray.scripts", "dashboard", "runtime_env", "monitor.py", "ray/_private/log")
STARTING = ("IDLE", "__init__", ".start")  # in the title of a Ray worker that imports or loads


@dataclass
class Usage:
    """A process: its processor seconds so far, and those spent as each kind of process."""

    seconds: float = 0.0
    by_kind: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, kind: str, seconds: float) -> None:
        self.by_kind[kind] += seconds - self.seconds
        self.seconds = seconds


def kind_of(command: Sequence[str]) -> str:
    """Return the kind of a process, by its command line or by the title that it has given itself."""
    line = " ".join(command)
    if "pytest" in line or "exec(eval(sys.stdin.readline()))" in line:
        return "test processes: imports, unit tests"
    if line.startswith("ray::"):
        if any(part in line for part in ("Dashboard", "RuntimeEnv")):
            return "Ray itself"
        if any(part in line for part in STARTING):
            return "Ray workers: boot, imports, loading"
        return "Ray workers: steps" if "Worker" in line else "Ray workers: store index and others"
    if "default_worker.py" in line or "setup_worker.py" in line:
        return "Ray workers: boot, imports, loading"
    if "prefect_server.py" in line or "prefect server" in line:
        return "Prefect servers"
    if any(part in line for part in RAY_PARTS):
        return "Ray itself"
    if "flows.cli.main" in line or "flows.deployments" in line or "/sluice " in line or "benchmarks" in line:
        return "commands: imports, driving"
    if "vllm" in line.lower():
        return "vLLM"
    return "others"


def measure(command: Sequence[str]) -> tuple[int, float, dict[str, tuple[int, float]]]:
    """Run a command; return its exit code, its wall-clock seconds, and processes and seconds by kind."""
    began, used, mark = time.time(), dict[tuple[int, float], Usage](), uuid4().hex
    others = set[tuple[int, float]]()
    process = subprocess.Popen(command, env=os.environ | {MARK: mark})
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        for found in psutil.process_iter():
            try:
                with found.oneshot():
                    identity = found.pid, found.create_time()
                    if identity in others:
                        continue
                    if identity not in used and found.environ().get(MARK) != mark:
                        others.add(identity)
                        continue
                    times = found.cpu_times()
                    used.setdefault(identity, Usage()).add(kind_of(found.cmdline()), times.user + times.system)
            except psutil.Error:  # it has ended
                continue
    kinds: dict[str, tuple[int, float]] = {}
    for usage in used.values():
        if not usage.by_kind:  # it ended while it was looked at
            continue
        main = max(usage.by_kind, key=lambda kind: usage.by_kind[kind])
        for kind, seconds in usage.by_kind.items():
            number, total = kinds.get(kind, (0, 0.0))
            kinds[kind] = (number + (kind == main), total + seconds)
    return process.returncode, time.time() - began, kinds


def main() -> None:
    """Print the table, and write it as JSON if `--json FILE` comes first; exit as the command did."""
    arguments = sys.argv[1:]
    path = Path(arguments[1]) if arguments[0] == "--json" else None
    code, wall, kinds = measure(arguments[2:] if path else arguments)
    cores = os.cpu_count() or 1
    kinds["waiting"] = (0, cores * wall - sum(seconds for _, seconds in kinds.values()))
    print(f"\n{wall:.0f} s on {cores} cores; processor seconds by kind of process")
    for kind, (number, seconds) in sorted(kinds.items(), key=lambda entry: -entry[1][1]):
        print(f"{kind:38} {number:5} {seconds:8.0f} {seconds / cores / wall:6.1%}")
    if path:
        path.write_text(json.dumps({"wall": wall, "code": code, "kinds": kinds}))
    sys.exit(code)


if __name__ == "__main__":
    main()
