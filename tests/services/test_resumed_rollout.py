"""A rollout that was abandoned in the middle, or whose rows were lost, goes on from its journal in another worker."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from infra.engines.embedded.engine import TransformersEngine
from infra.engines.embedded.rows import TransformersRows
from infra.environments.journal import Batch, Entry, Exchange, Journal, dump, load
from infra.environments.pool import EnvironmentPool
from infra.environments.trajectory import TrajectoryBuilder
from infra.models.load import load_model, load_tokenizer
from infra.storage.lines import LocalLines
from infra.storage.runs import RunDirectory
from schemas.config.changes import sampling_digest
from schemas.step import RunHandle
from tests.support.configs import merge
from tests.support.engine_checks import plain_logprobs
from tests.support.programs import program
from tests.support.progress import children_running
from tests.support.rollout_workers import GROUPS, NUM_SAMPLES, make_folder, play, run_of

ENDS = tuple(range(64))  # tokens that end a turn: a tiny model samples its real one too rarely
MAX_TURNS = 3
CUT = ("length", "turn_length")  # ends of trajectories whose environment was not asked for the last turn
BITS = ("batch", "lockstep")  # the values of `resume_rows` that promise the same bits


# Does what `Noted` does.
PROGRAM = """
    log, index = open({log!r}, "a", buffering=1), task["info"]["index"]
    log.write("reset\\n")
    messages[-1]["content"] += f" I am {{task['seed'] % 1000}}"
    for at in range(1 + index % 3):
        said = ask(**{limits})
        log.write("step\\n")
        say(f"{{at}}: {{len(said)}}")
    finish(0.5)
"""


LIMITS = {"stop": list("abcdefghijklmnopqrstuvwxyz"), "max_tokens": 9, "logprobs": True}  # of a program's requests


class AbandonedError(Exception):
    """Takes the place of a kill."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def _importable_rewards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "calls").unlink(missing_ok=True)


def run_with(folder: Path, game: str, **overrides: Any) -> RunHandle:
    """Return a run, in a directory of its own, with an environment that may note its calls in its parent."""
    arguments = {"log": str(folder / "calls")} if game in ("Noted", "Salted", "Search") else {}
    environment = {"kind": "class", "path": f"tests.support.games:{game}", "arguments": arguments, "num_processes": 2}
    if game in ("Program", "Limited"):
        limits = LIMITS if game == "Limited" else {}
        code = PROGRAM.format(log=str(folder / "calls"), limits=limits)
        environment = program(folder, code, num_processes=2).model_dump()
    fields = {
        "environment": {**environment, "max_turns": MAX_TURNS},
        "rollout": {"max_response_tokens": 200, "stop_token_ids": ENDS},
    }
    return run_of(folder, **merge(fields, overrides))


def elsewhere(folder: Path, run: RunHandle) -> RunHandle:
    """Return the same run without a journal, as if it had not been disturbed."""
    (folder / "undisturbed").mkdir(exist_ok=True)
    environment = run.config.environment.replace(journal=False)
    return run.replace(directory=str(folder / "undisturbed"), config=run.config.replace(environment=environment))


def abandon(run: RunHandle, monkeypatch: pytest.MonkeyPatch, *, num_ended: int = 0, num_answers: int = 0) -> None:
    """Have a worker generate step 0 until so many trajectories have ended, and so many turns are answered."""
    ended, answered = list[Any](), list[Any]()
    step, finish, add_answer = TransformersRows.step, TrajectoryBuilder.finish, TrajectoryBuilder.add_answer

    def step_or_die(rows: TransformersRows) -> Any:
        if len(ended) >= num_ended and len(answered) >= num_answers:
            raise AbandonedError
        return step(rows)

    with monkeypatch.context() as patch:
        patch.setattr(TransformersRows, "step", step_or_die)
        patch.setattr(TrajectoryBuilder, "finish", lambda row, end: ended.append(row) or finish(row, end))
        patch.setattr(
            TrajectoryBuilder, "add_answer", lambda row, reply: answered.append(row) or add_answer(row, reply)
        )
        with pytest.raises(AbandonedError):
            play(run)


def recorded(run: RunHandle) -> dict[str, list[Exchange]]:
    """Return what the journal holds, by sample."""
    batch = Batch(run_id="run", step=0, batch=0, settings=sampling_digest(run.config), groups=tuple(GROUPS))
    rows = [(group, sample) for group in GROUPS for sample in range(NUM_SAMPLES)]
    journal = Journal(RunDirectory.of(run).journals, batch, rows, 10**6)
    return {f"0-{group}-{sample}": journal.recorded(row) for row, (group, sample) in enumerate(rows)}


def has_ended(exchanges: list[Exchange], row: dict[str, Any]) -> bool:
    """Return whether a trajectory's journal has all of its turns, given its row: one cut off has no last answer."""
    is_cut = row["episode_end"] in CUT
    return len(exchanges) > len(row["turn_tokens"]) and (is_cut or exchanges[-1].reply is not None)


def calls(folder: Path) -> int:
    """Return how many calls the environments had since this was last asked."""
    path = folder / "calls"
    count = len(path.read_text().splitlines()) if path.exists() else 0
    path.unlink(missing_ok=True)
    return count


def num_calls(row: dict[str, Any]) -> int:
    """Return the calls of a trajectory, with its reset."""
    return 1 + len(row["turn_tokens"]) - (row["episode_end"] in CUT)


@pytest.mark.parametrize(
    ("game", "resume_rows"),
    [
        ("Noted", "batch"),
        ("Noted", "lockstep"),
        ("Noted", "as_ready"),
        ("Program", "lockstep"),
        ("Program", "as_ready"),
        ("Limited", "lockstep"),
        ("Limited", "as_ready"),
    ],
)
def test_what_was_answered_is_not_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, game: str, resume_rows: str
) -> None:
    rollout = {"top_k": 50, "sampling_mask": True}  # which is recorded, too
    run = run_with(folder, game, environment={"resume_rows": resume_rows}, rollout=rollout)
    _, expected = play(elsewhere(folder, run))
    assert calls(folder) == sum(map(num_calls, expected.values()))
    abandon(run, monkeypatch, num_ended=3)
    calls(folder)
    done = {sample for sample, exchanges in recorded(run).items() if has_ended(exchanges, expected[sample])}
    assert 0 < len(done) < len(expected)
    shard, rows = play(run)
    # Environments of the others are made again, and their past is replayed.
    assert calls(folder) == sum(num_calls(row) for sample, row in expected.items() if sample not in done)
    assert shard.telemetry["turns/recorded"].value > 0
    assert "turns/restarted" not in shard.telemetry
    if resume_rows in BITS:
        assert rows == expected
    else:
        assert {sample: row["response_ids"] for sample, row in rows.items()} == {
            sample: row["response_ids"] for sample, row in expected.items()
        }


def test_turns_that_their_requests_end_are_those_of_the_policy(folder: Path) -> None:
    run = run_with(folder, "Limited")
    _, rows = play(run)
    model, tokenizer, lasts = load_model(run.config.model), load_tokenizer(run.config.model), list[str]()
    for row in rows.values():
        assert row["episode_end"] == "done"
        assert max(row["turn_tokens"]) <= LIMITS["max_tokens"]
        trained, ids = np.array(row["loss_mask"]), np.array(row["response_ids"])
        found = plain_logprobs(model, row["prompt_ids"], ids, 1.0)
        np.testing.assert_allclose(np.array(row["sampler_logprobs"])[trained], found[trained], rtol=0, atol=1e-4)
        ends = np.flatnonzero(np.diff(trained, append=False) & trained)
        lasts += [tokenizer.decode(ids[end]) for end in ends]
        assert not set(tokenizer.decode(np.delete(ids, ends)[np.delete(trained, ends)])) & set(LIMITS["stop"])
    assert set(lasts) & set(LIMITS["stop"])


def test_killed_environment_processes_change_no_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(folder, "Program")
    _, expected = play(elsewhere(folder, run))
    num_before, add_answer = calls(folder), TrajectoryBuilder.add_answer
    answered, running = list[int](), list[psutil.Process]()

    def add_or_kill(row: TrajectoryBuilder, reply: Any) -> None:
        answered.append(row.number)
        if len(answered) == 3:
            running.extend(children_running("environments/child.py"))
        if len(answered) in (3, 9):
            running.pop().kill()
        add_answer(row, reply)

    monkeypatch.setattr(TrajectoryBuilder, "add_answer", add_or_kill)
    shard, rows = play(run)
    assert rows == expected
    assert calls(folder) > num_before  # programs were started again
    assert "turns/restarted" not in shard.telemetry
    assert shard.turns["turns/failed"].value == 0


@pytest.mark.parametrize(
    ("game", "resume_rows"),
    [
        ("Noted", "batch"),
        ("Noted", "as_ready"),
        ("Salted", "lockstep"),
        ("Fragile", "lockstep"),
        ("Endless", "lockstep"),
    ],
)
def test_a_batch_whose_rows_were_lost_needs_neither_engine_nor_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, game: str, resume_rows: str
) -> None:
    cut = {"resume_rows": resume_rows, "max_turn_tokens": 6}  # some turns are cut off
    rollout = {"top_k": 50, "sampling_mask": True} if game == "Noted" else {}
    run = run_with(folder, game, environment=cut, rollout=rollout)
    expected_shard, expected = play(run)
    calls(folder)
    monkeypatch.delattr(TransformersEngine, "open_rows")
    shard, rows = play(run)
    assert rows == expected
    assert calls(folder) == 0
    assert shard.turns == expected_shard.turns
    assert len(RunDirectory.of(run).journals.attempts(0, 0)) == 1  # nothing was added


def test_an_environment_without_a_state_is_asked_nothing_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(folder, "Search")  # answers otherwise in each process
    abandon(run, monkeypatch, num_answers=20)
    calls(folder)
    before = recorded(run)
    shard, rows = play(run)
    num_recorded = sum(exchange.reply is not None for exchanges in before.values() for exchange in exchanges)
    assert num_recorded > len(rows)
    assert calls(folder) == sum(map(num_calls, rows.values())) - num_recorded
    assert "turns/restarted" not in shard.telemetry
    for sample, exchanges in before.items():
        for text in observations(exchanges):
            assert text in rows[sample]["prompt_text"] + rows[sample]["response_text"]


def test_an_environment_that_answers_otherwise_has_its_trajectory_played_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with(folder, "Salted")
    abandon(run, monkeypatch, num_ended=3)
    before = recorded(run)
    salts = {exchanges[0].reply.observations[0].split()[-1] for exchanges in before.values()}
    shard, rows = play(run)
    answers = {sample: exchanges[-1].reply if exchanges else None for sample, exchanges in before.items()}
    unfinished = {sample for sample, answer in answers.items() if answer is None or not answer.done}
    assert 0 < len(unfinished) < len(rows)
    assert shard.telemetry["turns/restarted"].value == len(unfinished)
    assert caplog.text.count("is restarted") == len(unfinished)
    for sample, row in rows.items():
        assert (row["prompt_text"].split()[-1] in salts) == (sample not in unfinished)
        assert row["episode_end"] == "done"
        assert row["response_ids"]
    assert play(run)[1] == rows  # the journal has the new trajectories


@pytest.mark.parametrize("game", ["Noted", "Program"])
def test_no_turn_is_sampled_twice(folder: Path, monkeypatch: pytest.MonkeyPatch, game: str) -> None:
    sampled, step = list[Any](), TransformersRows.step

    def note(rows: TransformersRows) -> Any:
        sampled.extend(found := step(rows))
        return found

    monkeypatch.setattr(TransformersRows, "step", note)
    run = run_with(folder, game, environment={"resume_rows": "as_ready"})
    abandon(run, monkeypatch, num_answers=10)
    assert sampled
    rows = play(run)[1]
    assert len(sampled) == sum(len(row["turn_tokens"]) for row in rows.values())


@pytest.mark.parametrize(("game", "resume_rows"), [("Noted", "lockstep"), ("Program", "as_ready")])
def test_a_turn_is_durable_before_its_environment_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, game: str, resume_rows: str
) -> None:
    durable, sent = Counter[int](), Counter[int]()
    append, step = LocalLines.append, EnvironmentPool.step

    def append_late(lines: LocalLines, text: str) -> None:
        time.sleep(0.02)  # the rows go on meanwhile
        append(lines, text)
        for entry in map(load, text.splitlines(keepends=True)):
            durable[entry.get("group", 0) * NUM_SAMPLES + entry.get("sample", 0)] += "token_ids" in entry

    def check(pool: EnvironmentPool, row: int, action: str) -> None:
        sent[row] += 1
        assert durable[row] == sent[row]
        step(pool, row, action)

    monkeypatch.setattr(LocalLines, "append", append_late)
    monkeypatch.setattr(EnvironmentPool, "step", check)
    rows = play(run_with(folder, game, environment={"resume_rows": resume_rows}))[1]
    assert sent.total() == sum(num_calls(row) - 1 for row in rows.values())


def test_what_begins_otherwise_is_not_used(folder: Path) -> None:
    run = run_with(folder, "Noted")
    _, expected = play(run)
    (lines,) = RunDirectory.of(run).journals.attempts(0, 0)
    first, *others = list(lines.read())
    kept = [first]
    for entry in map(Entry.model_validate, map(load, others)):
        if (entry.group, entry.sample, entry.turn) == (0, 0, 0):
            kept.append(dump(entry.replace(begins_with="other")))
        elif (entry.group, entry.sample) != (0, 1):  # else the batch would be taken as it is
            kept.append(dump(entry))
    lines.replace(kept)
    calls(folder)
    assert play(run)[1] == expected
    assert calls(folder) == num_calls(expected["0-0-0"]) + num_calls(expected["0-0-1"])


@pytest.mark.parametrize("resume_rows", ["lockstep", "as_ready"])
@pytest.mark.parametrize("turn", [1, 2])
def test_what_an_environment_has_seen_takes_the_place_of_what_the_model_would_say(
    folder: Path, turn: int, resume_rows: str
) -> None:
    run = run_with(folder, "Noted", environment={"resume_rows": resume_rows})
    _, expected = play(run)
    forged = next(sample for sample, row in expected.items() if len(row["turn_tokens"]) == MAX_TURNS)
    said = forge(run, forged, turn)
    calls(folder)
    row = play(run)[1][forged]
    at = sum(row["turn_tokens"][: turn - 1]) + sum(row["turn_bridge_tokens"][: turn - 1])
    end = at + row["turn_tokens"][turn - 1]
    assert tuple(row["response_ids"][at:end]) == said
    assert calls(folder) == num_calls(row)
    trained = np.array(row["loss_mask"]) & (np.arange(len(row["loss_mask"])) >= end)  # goes on from these tokens
    assert trained.any()
    found = plain_logprobs(load_model(run.config.model), row["prompt_ids"], np.array(row["response_ids"]), 1.0)
    np.testing.assert_allclose(np.array(row["sampler_logprobs"])[trained], found[trained], rtol=0, atol=1e-4)


def forge(run: RunHandle, forged: str, turn: int) -> tuple[int, ...]:
    """Have a run's journal end a sample with another turn that has no answer; return the turn's tokens."""
    said: tuple[int, ...] = ()
    (lines,) = RunDirectory.of(run).journals.attempts(0, 0)
    first, *others = list(lines.read())
    kept = [first]
    for entry in map(Entry.model_validate, map(load, others)):
        if f"0-{entry.group}-{entry.sample}" != forged or entry.turn < turn:
            kept.append(dump(entry))
        elif entry.turn == turn and entry.token_ids:
            said = (entry.token_ids[0] ^ 1, *entry.token_ids[1:])
            kept.append(dump(entry.replace(token_ids=said)))
    lines.replace(kept)
    return said


def observations(exchanges: list[Exchange]) -> Iterator[str]:
    """Yield what the model has seen; after the last turn it sees nothing."""
    for exchange in exchanges[:MAX_TURNS]:
        yield from exchange.reply.observations if exchange.reply else ()


@pytest.mark.parametrize(
    "setting", [{"environment": {"journal": False}}, {"store": {"kind": "shared", "keep_steps": 0}}]
)
def test_a_run_without_a_journal(folder: Path, setting: dict[str, Any]) -> None:
    run = run_with(folder, "Noted", **setting)
    play(run)
    assert RunDirectory.of(run).journals.steps() == []
