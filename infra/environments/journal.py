"""The journal of a batch: what the model did in each turn, and what its environment answered, as it comes.

A line is a JSON object that begins with the checksum of the rest. The first line of a file says of which batch it is;
each other one has a turn of a trajectory, turn 0 being the reset, or the answer to the turn before it. A line replaces
what was recorded before of its trajectory from that turn on; a turn without the one before it, and an answer without
its turn, whose lines may be damaged, are not used.
"""

import json
import logging
import re
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Annotated, Any

import numpy as np
import xxhash
from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, model_validator

from infra.engines.base import Generation, SamplingMask
from infra.environments.slot import Failure, FailureKind, Reply
from infra.storage.journals import JournalFiles
from infra.storage.lines import LineWriter
from schemas.base import Frozen
from schemas.rollout import FinishReason

FORMAT = 1
_LINE = re.compile(r'\{"xxh3": "([0-9a-f]{16})", (.*\})\n', re.DOTALL)

logger = logging.getLogger(__name__)


class Batch(Frozen):
    """The first line of a file: the batch of which it is."""

    format: NonNegativeInt = FORMAT  # the format of the lines
    run_id: str  # the run
    step: NonNegativeInt  # the step
    batch: NonNegativeInt  # the number of the batch within the step
    settings: str  # the digest of the settings on which samples depend
    groups: tuple[NonNegativeInt, ...]  # its groups


class Answer(Frozen):
    """What an environment answered; see `Reply`."""

    observations: tuple[str, ...]
    roles: tuple[str, ...] = ()
    extras: str = ""
    tools: str = ""
    after: NonNegativeInt = 0
    sampling: str = ""
    reward: FiniteFloat
    done: bool
    metrics: dict[str, FiniteFloat]
    role: str
    seconds: NonNegativeFloat
    requests: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    failure: tuple[FailureKind, str] | None

    def reply(self) -> Reply:
        failure = Failure(*self.failure) if self.failure else None
        return Reply(**{**dict(self), "failure": failure}, is_recorded=True)


class Entry(Frozen):
    """A line. A reset has a digest of what its trajectory begins with; any other turn has tokens, or an answer has."""

    group: NonNegativeInt
    sample: NonNegativeInt
    turn: NonNegativeInt
    begins_with: str | None = None
    token_ids: tuple[Annotated[int, Field(strict=True, ge=0, lt=2**31)], ...] = ()
    logprobs: str = ""  # float32, little-endian, in base64
    finish_reason: FinishReason | None = None
    mask_counts: str = ""  # int32, little-endian, in base64, as are the ids; empty if the sampling doesn't keep it
    mask_ids: str = ""
    answer: Answer | None  # None: the environment was not asked, or has not answered yet

    @model_validator(mode="after")
    def _is_whole(self) -> "Entry":
        logprobs = np.frombuffer(b64decode(self.logprobs, validate=True), "<f4")  # raises if it is cut off
        if len(logprobs) != len(self.token_ids) or not np.isfinite(logprobs).all():
            raise ValueError(f"{len(logprobs)} log-probs of {len(self.token_ids)} tokens, or one that isn't finite")
        counts, ids = _int32(self.mask_counts), _int32(self.mask_ids)
        if self.mask_counts and (len(counts) != len(self.token_ids) or (counts < 1).any() or counts.sum() != len(ids)):
            raise ValueError(f"a sampling mask of {len(counts)} numbers and {len(ids)} ids")
        if self.turn == 0 and self.begins_with is None:
            raise ValueError("a reset without a digest")
        has_tokens = bool(self.token_ids)
        if has_tokens != (self.finish_reason is not None) or (self.turn > 0 and not has_tokens and self.answer is None):
            raise ValueError("a turn without tokens")
        return self


@dataclass(frozen=True)
class Exchange:
    """A reset or a turn of the model, and what the environment answered."""

    turn: Generation | None  # what the model sampled; None: it is the reset, or, to be recorded, in the line before
    reply: Reply | None  # what the environment answered; None: it was not asked, or has not answered yet
    begins_with: str | None = None  # of a reset, the digest of what the trajectory begins with


class Journal:
    """What is recorded of one batch: read when this is made; what is added is appended in the background.

    To be used as a context; at its end all is durable.

    Args:
        files: The run's.
        batch: The batch.
        rows: The group of each of the batch's N rows, and the row's number within the group.
        vocab_size: Token ids are below this.
    """

    def __init__(self, files: JournalFiles, batch: Batch, rows: Sequence[tuple[int, int]], vocab_size: int) -> None:
        self._files, self._batch, self._rows, self._vocab_size = files, batch, rows, vocab_size
        self._recorded: dict[tuple[int, int], list[Exchange]] = {key: [] for key in rows}
        for lines in files.attempts(batch.step, batch.batch):
            self._read(str(lines), list(lines.read()))
        self._writer: LineWriter[Batch | Entry] | None = None

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError:
            if error is None:  # else that one is raised
                raise

    def recorded(self, row: int) -> list[Exchange]:
        """Return what was recorded of a row before this was made: its reset, then its turns."""
        return self._recorded[self._rows[row]]

    def record(self, row: int, turn: int, exchange: Exchange) -> int:
        """Record a row's reset (turn 0), turn, or answer to its last turn; return the line's number (`is_durable`).

        Raises:
            OSError: The journal can't be written.
        """
        if self._writer is None:
            self._writer = LineWriter(self._files.begin(self._batch.step, self._batch.batch), dump)
            self._writer.write(self._batch)
        group, sample = self._rows[row]
        return self._writer.write(_entry_of(group, sample, turn, exchange))

    def is_durable(self, line: int, *, waits: bool) -> bool:
        """Return whether a line that was recorded is durable; if `waits`, once all are.

        Raises:
            OSError: The journal can't be written.
        """
        return self._writer is not None and self._writer.is_durable(line, waits=waits)

    def _read(self, name: str, lines: Sequence[str]) -> None:
        if not lines or not self._is_of_batch(name, lines[0]):
            return
        damaged, found = [], set[tuple[int, int]]()
        for number, line in enumerate(lines[1:], start=2):
            try:
                self._add(Entry.model_validate(load(line)), found)
            except (ValueError, RecursionError):
                damaged.append(number)
        if damaged and damaged != [len(lines)]:  # the last one may be what a kill has left
            logger.warning("%s: what follows in the trajectories of its damaged lines %s isn't used", name, damaged[:9])

    def _is_of_batch(self, name: str, line: str) -> bool:
        try:
            found = load(line)
            if found.get("format") == FORMAT and Batch.model_validate(found) == self._batch:
                return True
        except (ValueError, RecursionError):
            problem = "its first line is damaged"
        else:
            problem = f"it has format {found.get('format')!r:.20}, expected {FORMAT}"
            if found.get("format") == FORMAT:
                problem = "it is of other settings or prompts"
        logger.warning("%s isn't used: %s", name, problem)
        return False

    def _add(self, entry: Entry, found: set[tuple[int, int]]) -> None:
        """Add what a line has; `found` are the rows of which the file had lines before."""
        key, exchange = (entry.group, entry.sample), _exchange_of(entry)
        recorded = self._recorded.get(key, [])
        if max((*entry.token_ids, *_int32(entry.mask_ids)), default=0) >= self._vocab_size:
            raise ValueError("a token id is too large")
        if entry.turn > 0 and exchange.turn is None:
            if key not in found or len(recorded) != entry.turn + 1:  # its turn's line is damaged
                return
            exchange = replace(exchange, turn=recorded[-1].turn)
        if entry.turn <= len(recorded):
            recorded[entry.turn :] = [exchange]
            found.add(key)


def dump(value: Batch | Entry) -> str:
    """Return a line."""
    text = value.model_dump_json(exclude_defaults=isinstance(value, Entry))[1:]
    return f'{{"xxh3": "{xxhash.xxh3_64_hexdigest(text.encode())}", {text}\n'


def load(line: str) -> dict[str, Any]:
    """Return the content of a line without its checksum.

    Raises:
        ValueError: It is damaged.
    """
    if (match := _LINE.fullmatch(line)) is None or xxhash.xxh3_64_hexdigest(match[2].encode()) != match[1]:
        raise ValueError("the line is damaged")
    content: dict[str, Any] = json.loads("{" + match[2])
    return content


def _entry_of(group: int, sample: int, turn: int, exchange: Exchange) -> Entry:
    """Return what is recorded of an exchange; it is not validated, as that takes longer than all else."""
    sampled, reply = exchange.turn, exchange.reply
    fields: dict[str, Any] = {"group": group, "sample": sample, "turn": turn, "answer": None}
    if exchange.begins_with is not None:
        fields["begins_with"] = exchange.begins_with
    if sampled is not None:
        fields["token_ids"] = tuple(sampled.token_ids.tolist())
        fields["logprobs"] = b64encode(sampled.logprobs.astype("<f4").tobytes()).decode()
        fields["finish_reason"] = sampled.finish_reason
        if (mask := sampled.sampling_mask) is not None:
            parts = {"mask_counts": mask.counts, "mask_ids": mask.token_ids}
            fields |= {name: b64encode(part.astype("<i4").tobytes()).decode() for name, part in parts.items()}
    if reply is not None:
        failure = (reply.failure.kind, reply.failure.message) if reply.failure else None
        answer = asdict(reply) | {"failure": failure}
        del answer["is_recorded"]
        fields["answer"] = Answer.model_construct(**answer)
    return Entry.model_construct(**fields)


def _exchange_of(entry: Entry) -> Exchange:
    reply = entry.answer.reply() if entry.answer else None
    if entry.finish_reason is None:
        return Exchange(None, reply, entry.begins_with)
    logprobs = np.frombuffer(b64decode(entry.logprobs), "<f4").astype(np.float32)
    mask = SamplingMask(_int32(entry.mask_counts), _int32(entry.mask_ids)) if entry.mask_counts else None
    tokens = np.array(entry.token_ids, dtype=np.int32)
    return Exchange(Generation(tokens, logprobs, entry.finish_reason, sampling_mask=mask), reply)


def _int32(text: str) -> np.ndarray:
    """Return integers that were written in base64: int32."""
    return np.frombuffer(b64decode(text, validate=True), "<i4").astype(np.int32)
