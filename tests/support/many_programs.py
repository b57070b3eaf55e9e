"""What many programs cost the processes that serve them: a rollout worker plays a batch, with a tiny model.

`python -m tests.support.many_programs memory 1000` plays so many trajectories at once, each a real program of two
turns, and prints the memory of the processes; `python -m tests.support.many_programs journal` plays batches with and
without a journal, in turns, and prints what that costs per turn. Both print a line of JSON.
"""

import json
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil

from infra.environments.slot import PROGRAM
from infra.storage.lines import LocalLines
from infra.workers.rollout import RolloutWorker
from schemas.step import RunHandle
from tests.support.configs import run_config
from tests.support.rollout_workers import worker_of
from tests.support.tiny import make_tiny_data, make_tiny_model

NUM_SAMPLES, MIB = 4, 2**20
MANY_SECONDS = 3600.0  # nothing here is a matter of time
ENDS = tuple(range(128))  # tokens that end a turn: a tiny model samples its real one too rarely

# Asks with nothing but bash, whose process has 3 MB; a turn's text is sent back as it came.
AGENT = r"""
url=${OPENAI_BASE_URL#http://}; host=${url%%/*}; turns=$1
messages='{"role": "user", "content": "Begin."}'
for ((turn = 1; turn <= turns; turn++)); do
  body="{\"messages\": [$messages]}"
  exec 3<>"/dev/tcp/${host%:*}/${host#*:}"
  printf 'POST /%s/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n' \
    "${url#*/}" "${#body}" >&3
  printf 'Authorization: Bearer %s\r\n\r\n%s' "$OPENAI_API_KEY" "$body" >&3
  while IFS= read -r line <&3 || [ -n "$line" ]; do answer=$line; done
  exec 3>&-
  text=${answer#*'"content": '}
  messages+=", {\"role\": \"assistant\", \"content\": ${text%%'}, "finish_reason"'*}}"
  messages+=', {"role": "user", "content": "Go on."}'
done
echo '{"reward": 1.0}'
"""


def open_worker(folder: Path, num_programs: int, num_turns: int, **environment: object) -> RolloutWorker:
    """Return a started worker for a batch of such programs.

    Args:
        folder: An empty folder, or one that this was called with before.
        num_programs: How many it plays at once, a multiple of `NUM_SAMPLES`.
        num_turns: The turns of each.
        **environment: Fields of the environment's config.
    """
    make_tiny_model(folder / "model")
    make_tiny_data(folder / "train.parquet", num_programs // NUM_SAMPLES)
    make_tiny_data(folder / "eval.parquet", 1)
    (folder / "agent.sh").write_text(AGENT)
    limits = {f"{name}_timeout_seconds": MANY_SECONDS for name in ("reset", "step", "trajectory")}
    command = ["bash", str(folder / "agent.sh"), str(num_turns)]
    fields: dict[str, Any] = {"kind": "program", "command": command, "num_processes": 1}
    sizes = {"num_prompts": num_programs // NUM_SAMPLES, "samples_per_prompt": NUM_SAMPLES}
    config = run_config(
        folder,
        environment={**fields, **limits, **environment},
        reward={"kind": "environment"},
        rollout={**sizes, "max_response_tokens": 400, "stop_token_ids": ENDS},
    )
    directory = str(folder / "runs" / "many")
    return worker_of(
        RunHandle(run_id="many", identity="many", directory=directory, config=config, store_incarnation="memory")
    )


def measure_memory(num_programs: int) -> dict[str, float]:
    """Play two turns of so many programs at once.

    Returns:
        `at_once`: the most programs that ran; MiB, each before the programs and at its peak: `environment_process`,
        `rollout_worker`; the `programs`' own, all together; and the `seconds` that it took.
    """
    with tempfile.TemporaryDirectory() as folder:
        worker, found = open_worker(Path(folder), num_programs, num_turns=2), dict[str, float]()
        (environment,) = [each for each in psutil.Process().children() if PROGRAM in each.cmdline()]
        processes = {"environment_process": environment, "rollout_worker": psutil.Process()}
        found = {f"{name}_before": _status(each, "VmRSS") for name, each in processes.items()}
        ended, seen = Event(), dict[str, float]()
        watch = Thread(target=_watch, args=(environment, num_programs, ended, seen))
        watch.start()
        started = time.monotonic()
        shard = worker.generate(0, 0, 0, range(num_programs // NUM_SAMPLES))
        seconds = time.monotonic() - started
        ended.set()
        watch.join()
        assert set(shard.rewards) == {1.0}, set(shard.rewards)
        found |= {name: _status(each, "VmHWM") for name, each in processes.items()}
        worker.close()
    return {"programs": num_programs, **found, **seen, "seconds": seconds}


def measure_journal(num_programs: int = 64, num_turns: int = 4, num_plays: int = 15) -> dict[str, float]:
    """Play batches with and without a journal, in turns.

    Returns:
        The `turns` of a batch; the medians of the worker's processor seconds `with` and `without` a journal, the
        difference per turn in ms; and how long a line's sync takes on this disk, in ms.
    """
    groups, spent = range(num_programs // NUM_SAMPLES), {True: list[float](), False: list[float]()}
    with tempfile.TemporaryDirectory() as folder:
        workers = {}
        for journal in spent:
            (own := Path(folder) / str(journal)).mkdir()
            workers[journal] = open_worker(own, num_programs, num_turns, journal=journal)
        for step in range(num_plays + 1):
            for journal, worker in workers.items():
                before = time.process_time()
                worker.generate(step, 0, 0, groups)
                if step > 0:  # the first one pays for what is done once
                    spent[journal].append(time.process_time() - before)
        for worker in workers.values():
            worker.close()
        lines, syncs = LocalLines(Path(folder) / "lines"), list[float]()
        for _ in range(100):
            before = time.perf_counter()
            lines.append("x" * 200 + "\n")
            syncs.append(time.perf_counter() - before)
    turns, medians = num_programs * num_turns, {kept: statistics.median(times) for kept, times in spent.items()}
    return {
        "turns": turns,
        "with": medians[True],
        "without": medians[False],
        "ms_per_turn": (medians[True] - medians[False]) / turns * 1000,
        "ms_per_sync": statistics.median(syncs) * 1000,
    }


def _watch(environment: psutil.Process, num_programs: int, ended: Event, seen: dict[str, float]) -> None:
    """Note the most programs that ran at once, and, when all do, their own memory, until an event."""
    seen |= {"at_once": 0, "programs_own": 0.0}
    while not ended.wait(0.2):
        programs = [each for each in environment.children() if _name(each) == "bash"]
        seen["at_once"] = max(seen["at_once"], len(programs))
        if len(programs) == num_programs and not seen["programs_own"]:
            for each in programs:
                with suppress(psutil.Error):  # it has ended
                    seen["programs_own"] += each.memory_full_info().uss / MIB


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _status(process: psutil.Process, name: str) -> float:
    """Return an entry of a process's status in MiB, such as VmRSS, or VmHWM, its peak."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024


if __name__ == "__main__":
    kind, *sizes = sys.argv[1:]
    measured = {"memory": measure_memory, "journal": measure_journal}[kind](*map(int, sizes))
    print(json.dumps({name: round(value, 3) for name, value in measured.items()}))
