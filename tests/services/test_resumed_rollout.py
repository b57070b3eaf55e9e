"""A rollout that was abandoned in the middle, or whose rows were lost, goes on from its journal in another worker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.engines.embedded.engine import TransformersEngine
from infra.engines.embedded.rows import TransformersRows
from infra.environments.journal import Batch, Entry, Exchange, Journal, dump, load
from infra.environments.trajectory import TrajectoryBuilder
from infra.storage.runs import RunDirectory
from schemas.config.changes import sampling_digest
from schemas.step import RunHandle
from tests.support.configs import merge
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
        said = ask()
        log.write("step\\n")
        say(f"{{at}}: {{len(said)}}")
    finish(0.5)
"""


class AbandonedError(Exception):
    """Takes the place of a kill."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def _importable_rewards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)


def run_with(folder: Path, game: str, **overrides: Any) -> RunHandle:
    """Return a run, in a directory of its own, with an environment that may note its calls in its parent."""
    arguments = {"log": str(folder / "calls")} if game in ("Noted", "Salted", "Search") else {}
    environment = {"kind": "class", "path": f"tests.support.games:{game}", "arguments": arguments, "num_processes": 2}
    if game == "Program":
        environment = program(folder, PROGRAM.format(log=str(folder / "calls")), num_processes=2).model_dump()
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


@pytest.mark.parametrize("turn", [0, 1, 2, 3])
def test_from_where_the_model_does_otherwise_the_environment_is_asked(folder: Path, turn: int) -> None:
    run = run_with(folder, "Noted")
    _, expected = play(run)
    forged = next(sample for sample, row in expected.items() if len(row["turn_tokens"]) == 3)
    missing = next(sample for sample in expected if sample != forged)  # else the batch would be taken as it is
    (lines,) = RunDirectory.of(run).journals.attempts(0, 0)
    path = Path(str(lines))
    path.write_text("".join(forge(path.read_text().splitlines(keepends=True), forged, turn, missing)))
    calls(folder)
    assert play(run)[1] == expected
    assert calls(folder) == num_calls(expected[forged]) + num_calls(expected[missing])


def forge(lines: list[str], forged: str, turn: int, missing: str) -> Iterator[str]:
    """Yield a journal's lines with another turn of a sample, and without those of another one."""
    yield lines[0]
    for entry in map(Entry.model_validate, map(load, lines[1:])):
        sample = f"0-{entry.group}-{entry.sample}"
        if (sample, entry.turn) == (forged, turn):
            token_ids = (*entry.token_ids[:-1], *(each ^ 1 for each in entry.token_ids[-1:]))
            yield dump(entry.replace(token_ids=token_ids) if turn else entry.replace(begins_with="other"))
        elif sample != missing:
            yield dump(entry)


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
