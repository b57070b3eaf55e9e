"""Runs that a script starts: with a reward of its own, continued in an event loop as in a notebook, and resumed."""

import json
from typing import Any

import pytest

from tests.support.workplace import Workplace

SCRIPT = """
import asyncio
from flows import train_run, train_run_async

CONFIG = {
    "steps": 1,
    "model": {"path": "model"},
    "data": {"train_path": "train.parquet"},
    "rollout": {"num_prompts": 2, "samples_per_prompt": 2, "max_response_tokens": 8},
    "runtime": {"placement": "colocated"},
    "store": {"kind": "shared"},
}

def score(prompt, completion, answer, info):
    return len(completion) / 8

async def cell(steps):
    return await train_run_async(CONFIG | {"steps": steps}, reward=score, run_id="scripted")

if __name__ == "__main__":
    for summary in (asyncio.run(cell(1)), train_run(CONFIG, reward=score, run_id="scripted"), *MORE):
        print("SUMMARY", summary.model_dump_json())
"""


def test_a_script_trains_with_a_reward_of_its_own(workplace: Workplace) -> None:
    """In an event loop, as in a notebook, with workers that take turns; then the summary is returned at once."""
    printed = workplace.python(_write(workplace, "my_run.py", SCRIPT.replace("*MORE", "")))
    first, again = _summaries(printed)
    assert first["steps"] == 1
    assert again == first
    run = workplace.run("scripted")
    assert run.config().reward.path == "scripts.my_run:score"
    assert [set(report.memory_by_phase) for report in run.metrics.steps()] == [{"rollout", "scoring", "update"}]


@pytest.mark.extended
def test_a_second_run_of_a_process_continues_and_so_does_the_command(workplace: Workplace) -> None:
    more = SCRIPT.replace("*MORE", "train_run(CONFIG | {'steps': 2}, reward=score, run_id='scripted')")
    printed = workplace.python(_write(workplace, "longer.py", more.replace("scripted", "continued")))
    assert [summary["steps"] for summary in _summaries(printed)] == [1, 1, 2]
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    assert len(lines) == 2, printed  # each step's line once, also by the second run of the process
    assert "2 of 3 steps are done" in workplace.sluice("resume", "continued", "steps=3")
    assert workplace.run("continued").num_done == 3


@pytest.mark.extended
def test_a_run_that_never_started_is_not_told_to_be_resumed(workplace: Workplace) -> None:
    script = SCRIPT.replace('"steps": 1,', '"steps": 1, "services": {"ray_address": "127.0.0.1:1"},')
    printed = workplace.python(_write(workplace, "no_ray.py", script.replace("scripted", "unstarted")), exit_code=1)
    assert "no Ray head responds at '127.0.0.1:1'" in printed
    assert "to resume" not in printed


@pytest.mark.extended
def test_a_script_without_a_main_guard_is_told_so_before_anything_starts(workplace: Workplace) -> None:
    script = SCRIPT.replace('if __name__ == "__main__":', "if True:").replace("scripted", "unguarded")
    printed = workplace.python(_write(workplace, "unguarded.py", script.replace("*MORE", "")), exit_code=1)
    assert 'call it under `if __name__ == "__main__":`' in printed.splitlines()[-1]
    assert "starting" not in printed


def _summaries(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("SUMMARY ")) for line in printed.splitlines() if "SUMMARY" in line]


def _write(workplace: Workplace, name: str, script: str) -> str:
    folder = workplace.folder / "scripts"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(script)
    return f"scripts/{name}"
