"""The choice of the faults and the verdict; CI runs the campaign itself (`make chaos`)."""

import json
import sys
from base64 import b64encode
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.chaos.faults import FAULTS_PER_RUN, KINDS, MOMENTS, OF_AGENTS, STREAM_BYTES, _serving, choose_faults
from benchmarks.chaos.run import AGENT, CLIENTS, FAULTLESS, Plan, is_passed, measure
from infra.environments.answers import OTHERWISE
from infra.environments.journal import Entry, dump
from infra.environments.program import write_turn
from schemas.errors import ConfigError
from tests.support.programs import begin, program_at, row, started
from tests.support.progress import wait_until
from tests.support.run_results import count_turns

SEED = 0


def test_faults_are_a_function_of_the_seed_and_cover_everything() -> None:
    runs = choose_faults(SEED, 100)
    assert runs == choose_faults(SEED, 100) != choose_faults(SEED + 1, 100)
    assert [len(faults) for faults in runs] == [FAULTS_PER_RUN] * (100 // FAULTS_PER_RUN)
    faults = [fault for run in runs for fault in run]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert min(Counter(fault.kind for fault in faults).values()) >= 100 // len(KINDS) - 2
    assert {fault.moment for fault in faults} == {*MOMENTS, "start"}
    assert not any(fault.kind == "store" for run in runs[::2] for fault in run)


def test_runs_of_agents_have_faults_of_their_own() -> None:
    kinds = Counter(fault.kind for run in choose_faults(SEED, 40, OF_AGENTS) for fault in run)
    assert kinds == dict.fromkeys(OF_AGENTS.kinds, 10)
    faults = [fault for run in choose_faults(SEED, 400, OF_AGENTS) for fault in run]
    sizes = [fault.delay for fault in faults if fault.moment == "stream"]
    assert len(sizes) > len(faults) / 2
    assert all(size in range(1, STREAM_BYTES + 1) for size in sizes)
    assert len(set(sizes)) > len(sizes) / 2


@pytest.mark.parametrize("client", range(len(CLIENTS)))
@pytest.mark.parametrize("size", [350, 401, 10**6])  # it goes on, it hangs up, and it ends before
def test_an_agent_stops_reading_at_a_byte_until_a_fault_has_struck(tmp_path: Path, client: int, size: int) -> None:
    (tmp_path / "wanted").write_text(str(size))
    command = [sys.executable, str(AGENT), str(tmp_path), *CLIENTS]
    with started(program_at(AGENT, command=command)) as pool:
        begin(pool, row(str(client)))
        (taken,) = tmp_path.glob("taken-*")
        agent = int(taken.name.partition("-")[2])
        reached, own = tmp_path / f"reached-{agent}", psutil.Process(pool.pids[0])
        texts = ["first", "second", "third", "fourth", "fifth"]
        for at, text in enumerate(texts):
            pool.step(0, write_turn(text, 10, 3))
            if (at == 0) if size < 10**6 else text == texts[-1]:
                wait_until(reached.exists)
                others = [psutil.Process(), own, *own.children()]
                assert _serving(others[1:], agent) == _serving([own], agent) == [own]
                assert _serving(own.children(), agent) == own.children()
                assert len((tmp_path / "received").read_text().splitlines() if at else []) == at + (at > 0)
                reached.unlink()
            reply = pool.wait()[0]
        assert (reply.failure, reply.done, reply.reward) == (None, True, len(set("fifth")) / 12)
    lines = [json.loads(line) for line in (tmp_path / "received").read_text().splitlines()]
    assert lines == [[0, texts[: at + 1]] for at in range(5)]  # the seed, and the same answer though it hung up


def line_of(turn: int, tokens: list[int], logprob: float = -0.5, sample: int = 0) -> str:
    logprobs = np.full(len(tokens), logprob, "<f4").tobytes()
    fields = {"token_ids": tokens, "logprobs": b64encode(logprobs).decode(), "finish_reason": "stop", "answer": None}
    return dump(Entry.model_validate({"group": 3, "sample": sample, "turn": turn, **fields}))


@pytest.mark.parametrize(
    ("later", "recorded", "again", "twice"),
    [
        (line_of(1, [5, 6]), 1, 1, 0),
        (line_of(1, [5, 6])[:-9], 1, 0, 0),  # what a kill has cut
        (line_of(1, [5, 7]), 1, 1, 1),
        (line_of(1, [5, 6], logprob=-0.25), 1, 1, 1),
        (line_of(2, [9]), 2, 0, 0),
        (line_of(2, [8]), 2, 0, 1),  # the row has another one
        (line_of(1, [5, 7], sample=1), 2, 0, 1),
    ],
)
def test_turns_that_were_sampled_twice_are_counted(
    tmp_path: Path, later: str, recorded: int, again: int, twice: int
) -> None:
    for attempt, line in enumerate([line_of(1, [5, 6]), later], start=1):
        (tmp_path / f"step-000002-00000-000{attempt}-ab.jsonl").write_text(f"first\n{line}")
    stored: dict[str, Any] = {"turn_tokens": [2, 1], "turn_bridge_tokens": [3, 0], "response_ids": [5, 6, 0, 0, 0, 9]}
    stored["sampler_logprobs"] = [-0.5, -0.5, 0.0, 0.0, 0.0, -0.5]
    rows = [{**stored, "sample_id": f"2-3-{sample}"} for sample in (0, 1)]
    counts = count_turns(tmp_path.iterdir(), rows, "")
    assert counts == Counter(turns=4, turns_recorded=recorded, turns_recorded_again=again, turns_sampled_twice=twice)
    warned = count_turns(tmp_path.iterdir(), rows, f"WARNING rollout-0: row 3, turn 1: {OTHERWISE}\n")
    assert warned - counts == Counter(turns_sampled_twice=1)


@pytest.mark.parametrize("option", [{"python": "python3"}, {"engine": True}])
def test_options_of_agents_are_refused_without_them(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="add --agents"):
        measure(Plan(**option))


@pytest.mark.parametrize("name", ["identical", *FAULTLESS])
def test_one_wrong_figure_fails_the_campaign(name: str) -> None:
    good = {"kills": 10, "resumes": 4, "identical": True, "faults": [], **dict.fromkeys(FAULTLESS, 0)}
    assert is_passed(good)
    assert not is_passed({**good, name: not good[name]})
