"""A batch's journal: what is read back are the same bits, and nothing that is damaged or of another batch."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import xxhash

from infra.engines.base import Generation, SamplingMask
from infra.environments.journal import Batch, Exchange, Journal, dump, load
from infra.environments.slot import Failure, Reply
from infra.storage.journals import JournalFiles
from infra.storage.lines import LocalLines
from infra.storage.runs import RunDirectory

BATCH = Batch(run_id="run", step=7, batch=3, settings="s", groups=(4, 5))
ROWS = [(4, 0), (4, 1), (5, 0)]
VOCAB_SIZE = 300
RESET = Exchange(None, Reply(("Guess é \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),)), "digest")


@pytest.fixture
def files(tmp_path: Path) -> JournalFiles:
    return RunDirectory(tmp_path).journals


def turn(*ids: int, reply: Reply | None = None, mask: SamplingMask | None = None) -> Exchange:
    logprobs = np.random.default_rng(ids[0]).normal(size=len(ids)).astype(np.float32)
    return Exchange(Generation(np.array(ids, np.int32), logprobs, "stop", sampling_mask=mask), reply)


def answer(text: str) -> Reply:
    counts = {"messages": 2, "seconds": 0.5}
    return Reply((text, ""), 0.1 + 0.2, done=True, metrics={"x": 1 / 3}, role="tool", seconds=0.25, requests=counts)


def write(files: JournalFiles, *entries: tuple[int, int, Exchange], batch: Batch = BATCH) -> None:
    with Journal(files, batch, ROWS, VOCAB_SIZE) as journal:
        for entry in entries:
            journal.record(*entry)


def read(files: JournalFiles, batch: Batch = BATCH) -> list[list[Exchange]]:
    journal = Journal(files, batch, ROWS, VOCAB_SIZE)
    return [journal.recorded(row) for row in range(len(ROWS))]


def path_of(files: JournalFiles) -> Path:
    (lines,) = files.attempts(BATCH.step, BATCH.batch)
    return Path(str(lines))


def lengths(files: JournalFiles) -> list[int]:
    return [len(exchanges) for exchanges in read(files)]


def line_of(content: str) -> str:
    """Return a line whose checksum is right."""
    text = content[1:]
    return f'{{"xxh3": "{xxhash.xxh3_64_hexdigest(text.encode())}", {text}\n'


@pytest.fixture
def written(files: JournalFiles) -> Path:
    """The file of a journal: two turns of row 0, one of row 1."""
    entries = [
        *((0, 0, RESET), (1, 0, RESET), (0, 1, turn(3, 4, reply=answer("a")))),
        *((1, 1, turn(9, reply=answer("b"))), (0, 2, turn(5))),
    ]
    write(files, *entries)
    return path_of(files)


def test_what_is_read_are_the_same_bits(files: JournalFiles) -> None:
    failed = Reply(seconds=3.0, failure=Failure("timeout", "no answer"))
    mask = SamplingMask(np.array([2, 1, 1], np.int32), np.array([3, 9, 299, 0], np.int32))
    turns = [turn(3, 299, 0, reply=answer("a"), mask=mask), turn(4, reply=failed), turn(5)]
    write(files, (0, 0, RESET), *((0, number, each) for number, each in enumerate(turns, 1)))
    found = read(files)[0]
    assert found[0].reply == Reply(RESET.reply.observations, is_recorded=True)
    assert found[0].begins_with == "digest"
    for expected, exchange in zip(turns, found[1:], strict=True):
        assert exchange.turn.logprobs.tobytes() == expected.turn.logprobs.tobytes()
        assert exchange.turn.token_ids.tolist() == expected.turn.token_ids.tolist()
        assert (exchange.turn.token_ids.dtype, exchange.turn.logprobs.dtype) == (np.int32, np.float32)
    assert [exchange.turn.sampling_mask is None for exchange in found[1:]] == [False, True, True]
    kept = found[1].turn.sampling_mask
    assert (kept.counts.tolist(), kept.token_ids.tolist()) == ([2, 1, 1], [3, 9, 299, 0])
    assert (kept.counts.dtype, kept.token_ids.dtype) == (np.int32, np.int32)
    assert [exchange.reply and exchange.reply.failure for exchange in found] == [None, None, failed.failure, None]
    assert found[1].reply.reward == 0.1 + 0.2
    assert found[1].reply.metrics == {"x": 1 / 3}


def test_a_file_is_lines_of_json(written: Path) -> None:
    first, *entries = map(json.loads, written.read_text().splitlines())
    assert first["format"] == 1
    assert [entry["turn"] for entry in entries] == [0, 0, 1, 1, 2]
    assert entries[2]["token_ids"] == [3, 4]
    assert b"pickle" not in written.read_bytes()


def test_an_answer_is_a_line_of_its_own_after_its_turn(files: JournalFiles, written: Path) -> None:
    write(files, (1, 2, turn(6, 7)), (1, 2, Exchange(None, answer("c"))))
    write(files, (1, 1, Exchange(None, answer("d"))), (1, 2, Exchange(None, answer("e"))))  # of no turn of this file
    found = read(files)[1]
    assert [exchange.reply and exchange.reply.observations[0] for exchange in found[1:]] == ["b", "c"]
    assert found[2].turn.token_ids.tolist() == [6, 7]


def test_an_answer_to_a_turn_that_is_damaged_is_not_used(files: JournalFiles, written: Path) -> None:
    write(files, (1, 1, turn(6)), (1, 1, Exchange(None, answer("c"))))
    path = Path(str(files.attempts(BATCH.step, BATCH.batch)[-1]))
    first, _, last = path.read_text().splitlines(keepends=True)
    path.write_text(f"{first}\n{last}")
    assert [exchange.reply.observations[0] for exchange in read(files)[1][1:]] == ["b"]


def test_lines_are_durable_after_a_wait(files: JournalFiles) -> None:
    with Journal(files, BATCH, ROWS, VOCAB_SIZE) as journal:
        lines = [journal.record(0, 0, RESET), journal.record(1, 0, RESET)]
        assert all(journal.is_durable(line, waits=True) for line in lines)
        assert not journal.is_durable(lines[-1] + 1, waits=True)
        assert lengths(files) == [1, 1, 0]


def test_later_attempts_replace_what_follows(files: JournalFiles, written: Path) -> None:
    write(files, (0, 1, turn(8, reply=answer("c"))), (2, 0, RESET))
    found = read(files)
    assert [len(exchanges) for exchanges in found] == [2, 2, 1]
    assert found[0][1].reply.observations == ("c", "")
    write(files, (0, 0, RESET))  # restarted
    assert lengths(files) == [1, 2, 1]
    assert len(files.attempts(7, 3)) == 3


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_last_line_that_was_cut_short_is_ignored(
    files: JournalFiles, written: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    written.write_bytes(written.read_bytes()[:-cut])
    assert lengths(files) == [2, 2, 0]
    assert not caplog.records


@pytest.mark.parametrize("damage", [b"\xff", b"7", b"\n"])
def test_a_damaged_line_costs_what_follows_in_its_trajectory(
    files: JournalFiles, written: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    lines = written.read_bytes().splitlines(keepends=True)
    at = lines[3].index(b"token_ids") + 12
    written.write_bytes(b"".join([*lines[:3], lines[3][:at] + damage + lines[3][at + 1 :], *lines[4:]]))
    assert lengths(files) == [1, 2, 0]
    assert "damaged lines [4" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({name: 8}, "of other settings or prompts") for name in ("step", "batch")),
        ({"run_id": "other"}, "of other settings or prompts"),
        ({"settings": "t"}, "of other settings or prompts"),
        ({"groups": (4, 6)}, "of other settings or prompts"),
        ({"format": 2}, "it has format 2, expected 1"),
    ],
)
def test_what_is_of_another_batch_is_not_used(
    files: JournalFiles, written: Path, changes: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, *rest = written.read_text().splitlines(keepends=True)
    written.write_text("".join([dump(Batch(**{**load(first), **changes})), *rest]))
    assert lengths(files) == [0, 0, 0]
    assert message in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        *({"token_ids": ids} for ids in ([300], [-1], [2**40], ["5"] * 2, "5", [1.5])),
        {"token_ids": [], "logprobs": ""},
        *({"logprobs": text} for text in ("AAAA", "not base64", 7, "AAAAAAAA", "AADAfwAAwH8=")),
        *({"turn": number} for number in (-1, "x", None, 2, 10**9)),
        *({"answer": each} for each in (7, {"observations": "text"}, {"__reduce__": "os.system"})),
        *({"group": 99}, {"finish_reason": "exploded"}, {"unknown": 1}, {"turn": 0}),
    ],
)
def test_hostile_content_is_not_used(files: JournalFiles, written: Path, content: dict[str, object]) -> None:
    lines = written.read_text().splitlines(keepends=True)
    forged = json.dumps({**load(lines[3]), **content})
    written.write_text("".join([*lines[:3], line_of(forged), lines[4]]))
    assert lengths(files) == [1, 2, 0]


@pytest.mark.parametrize("text", ["", "\n\n\n", "null\n", "[" * 100_000 + "\n", "{}\n", "\0" * 1000])
def test_a_file_of_nonsense_is_not_used(files: JournalFiles, written: Path, text: str) -> None:
    written.write_text(text)
    assert lengths(files) == [0, 0, 0]
    lines = [dump(BATCH), line_of('{"group": ' + "[" * 100_000 + "}"), text]
    written.write_text("".join(lines))
    assert lengths(files) == [0, 0, 0]


def test_a_full_disk_is_an_error_and_keeps_nobody_waiting(files: JournalFiles) -> None:
    full = JournalFiles(files._run, lambda name, suffix: LocalLines(Path("/dev/full")))
    with pytest.raises(OSError, match=r"/dev/full can't be written.*No space left") as caught:
        write(full, *[(0, 0, RESET)] * 5000)  # more than fit into the queue
    assert caught.value.errno == 28


def test_what_was_dropped_stays_away(files: JournalFiles, written: Path) -> None:
    lines = files.begin(BATCH.step, BATCH.batch)  # of a worker that is believed to be dead
    files.drop(BATCH.step)
    with pytest.raises(FileNotFoundError):
        lines.append("late\n")
    assert files.steps() == []


def test_steps_are_dropped_up_to_one(files: JournalFiles, caplog: pytest.LogCaptureFixture) -> None:
    for step in (5, 6, 7):
        write(files, (0, 0, RESET), batch=BATCH.replace(step=step))
    files.drop_before(7)
    assert files.steps() == [7]
    assert lengths(files) == [1, 0, 0]
    files.drop_all()
    assert files.steps() == []
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
