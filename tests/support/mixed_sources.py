"""Sources of prompts with environments of their own, in one run."""

from pathlib import Path
from typing import Any

import pytest

from schemas.step import RunHandle
from tests.support.rollout_workers import make_folder, run_of
from tests.support.tiny import tiny_row, write_rows

ENDS = tuple(range(64))  # tokens that end a turn: a tiny model samples its real one too rarely
GREETING = {"kind": "class", "path": "tests.support.games:Greeting", "num_processes": 1}
ECHO = {**GREETING, "path": "tests.support.games:Echo", "arguments": {"longest": 1}, "max_turns": 2}
NAMES = {"greeting": GREETING, "echo": ECHO, "plain": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("run"))
    for name in NAMES:
        write_rows(folder / f"{name}.jsonl", [tiny_row(number, data_source=name) for number in range(3)])
    write_rows(folder / "held-out.jsonl", [tiny_row(2, data_source=name) for name in ("plain", "greeting")])
    return folder


def sources(folder: Path, **environments: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [{"path": str(folder / f"{name}.jsonl"), "environment": each} for name, each in environments.items()]


def mixed(folder: Path, held_out: str = "held-out.jsonl", **environments: dict[str, Any] | None) -> RunHandle:
    data = {"train_path": "", "sources": sources(folder, **environments), "eval_path": str(folder / held_out)}
    rollout = {"num_prompts": 6, "samples_per_prompt": 2, "max_response_tokens": 200, "stop_token_ids": ENDS}
    return run_of(folder, reward="of_turns", data=data, rollout=rollout, eval={"temperature": 1.0})
