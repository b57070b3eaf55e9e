"""What answers the rows of a batch: the journal, as far as it goes, then environments."""

import hashlib
import json
import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from infra.datasets import PromptRow
from infra.engines.base import Generation
from infra.environments.journal import Exchange, Journal
from infra.environments.pool import EnvironmentPool, Reply
from rl_core.environments.base import Task

OTHERWISE = "the model did otherwise than the journal says"  # in a warning
logger = logging.getLogger(__name__)


@dataclass
class _Row:
    """One row's trajectory."""

    prompt: PromptRow  # its prompt, without what the reset adds to it
    seed: int  # the environment's
    recorded: deque[Exchange] = field(default_factory=deque)  # what the journal has of what comes next
    replies: list[Reply] = field(default_factory=list)  # what was answered to the reset and to `actions`
    actions: list[str] = field(default_factory=list)  # those that were answered
    action: str | None = None  # the text of an outstanding step
    num_turns: int = 0  # the model's turns
    line: int = 0  # the number of the newest one's line in the journal
    is_open: bool = False  # whether the pool holds its environment

    @property
    def begins_with(self) -> str:
        """The digest of what the trajectory begins with."""
        return _digest(self.prompt, self.seed)


class Answers:
    """Answers the rows of one batch, and records the model's turns and what environments answer.

    A row's environment is made only when it is asked for what is not recorded. Its recorded past is then replayed. It
    gets a turn once that is durable.

    Args:
        pool: Where the environments run; those of an earlier batch end.
        journal: The batch's; None: nothing is recorded.
    """

    def __init__(self, pool: EnvironmentPool, journal: Journal | None) -> None:
        self._pool, self._journal = pool, journal
        self._rows: dict[int, _Row] = {}
        self._replies: dict[int, Reply] = {}  # from the journal, until they are taken
        self._unsent: deque[tuple[int, str]] = deque()  # rows with turns that are not durable yet, and their texts
        pool.end_all()
        pool.replies.on_reply = self._on_reply

    def open(self, row: int, prompt: PromptRow, seed: int) -> None:
        """Begin a row's trajectory, and with it the reset of its environment, if it has one."""
        state = self._rows[row] = _Row(prompt, seed)
        found = self._journal.recorded(row) if self._journal else []
        is_usable = bool(found) and found[0].begins_with == state.begins_with
        if is_usable and (found[0].reply is None) == (prompt.environment is None):
            state.recorded.extend(found[1:])
            if (reply := found[0].reply) is not None:
                self._replies[row] = reply
                state.replies.append(reply)
        else:
            self._open_anew(row)

    def open_again(self, row: int) -> tuple[PromptRow, Reply]:
        """Restart a row's trajectory, without what is recorded; return its prompt, and the reply to the reset."""
        before = self._rows[row]
        if before.is_open:
            self._pool.end(row)
        logger.warning("row %d is restarted: its environment answers otherwise than the journal says", row)
        self._rows[row] = _Row(before.prompt, before.seed)
        self._open_anew(row)
        return before.prompt, self.wait([row])[row]

    def recorded(self, row: int) -> Sequence[Exchange]:
        """Return what the journal has of a row's turns that the model has not taken yet."""
        return tuple(self._rows[row].recorded)

    def next_turn(self, row: int) -> Generation | None:
        """Return what the journal has as a row's next turn, if it has one."""
        recorded = self._rows[row].recorded
        return recorded[0].turn if recorded else None

    def add_turn(self, row: int, turn: Generation) -> Generation:
        """Note a row's next turn; return it, or the recorded one in its place, which its environment may have seen."""
        state = self._rows[row]
        state.num_turns += 1
        if (recorded := self.next_turn(row)) is not None:
            if not np.array_equal(recorded.token_ids, turn.token_ids):
                logger.warning("row %d, turn %d: %s", row, state.num_turns, OTHERWISE)
            turn = recorded
        if recorded is None or state.recorded[0].reply is None:
            state.line = self._record(row, state.num_turns, Exchange(turn, None))
        return turn

    def step(self, row: int, action: str) -> None:
        """Begin the answer to a row's newest turn."""
        state = self._rows[row]
        state.action = action
        if state.recorded and (reply := state.recorded.popleft().reply) is not None:
            self._replies[row] = reply
            self._note(state, reply)
            return
        state.recorded.clear()  # what may follow was damaged
        if not state.is_open:
            prompt, state.is_open = state.prompt, True
            assert prompt.environment is not None, "a row without an environment gets no answer"
            self._pool.open_again(row, _task(prompt), state.seed, prompt.environment, state.replies, state.actions)
        self._unsent.append((row, action))
        self._send(waits=False)

    def wait(self, rows: Collection[int] | None = None) -> dict[int, Reply]:
        """Wait for the answers to these rows, or to all; return them by row."""
        self._send(waits=rows is None or any(row in rows for row, _ in self._unsent))
        own = self._take(self._replies if rows is None else rows)
        return own | self._pool.wait(None if rows is None else [row for row in rows if row not in own])

    def poll(self, *, waits: bool) -> dict[int, Reply]:
        """Return the answers that are there, by row; if `waits`, wait until there is one."""
        own = self._take(self._replies)
        waits = waits and not own
        self._send(waits=waits)
        return own | self._pool.poll(waits=waits)

    def receive(self) -> None:
        """Send turns that are durable, record the answers that have come, and leave them to be taken."""
        if self._journal is not None:
            self._send(waits=False)
            self._pool.receive()

    def end(self, row: int) -> None:
        """Forget a row, and close its environment."""
        if self._rows.pop(row).is_open:
            self._pool.end(row)

    def _send(self, *, waits: bool) -> None:
        """Send turns to their environments, as far as they are durable; if `waits`, once all are."""
        while self._unsent:
            row, action = self._unsent[0]
            if self._journal is not None and not self._journal.is_durable(self._rows[row].line, waits=waits):
                return
            self._unsent.popleft()
            self._pool.step(row, action)

    def _open_anew(self, row: int) -> None:
        state = self._rows[row]
        if state.prompt.environment is None:
            self._record(row, 0, Exchange(None, None, state.begins_with))
        else:
            state.is_open = True
            self._pool.open(row, _task(state.prompt), state.seed, state.prompt.environment)

    def _take(self, rows: Collection[int]) -> dict[int, Reply]:
        return {row: self._replies.pop(row) for row in list(rows) if row in self._replies}

    def _on_reply(self, row: int, reply: Reply) -> None:
        """Record what an environment has answered."""
        if reply.failure is None or reply.failure.kind != "differs":
            state = self._rows[row]
            begins_with = state.begins_with if state.num_turns == 0 else None
            self._record(row, state.num_turns, Exchange(None, reply, begins_with))
            self._note(state, reply)

    def _record(self, row: int, turn: int, exchange: Exchange) -> int:
        return 0 if self._journal is None else self._journal.record(row, turn, exchange)

    def _note(self, state: _Row, reply: Reply) -> None:
        state.replies.append(reply)
        if state.action is not None:
            state.actions.append(state.action)
        state.action = None


def _task(prompt: PromptRow) -> Task:
    return Task(prompt=prompt.messages, answer=prompt.answer, info=prompt.info)


def _digest(prompt: PromptRow, seed: int) -> str:
    content = hashlib.sha256(np.asarray(prompt.prompt_ids, dtype="<i8").tobytes())
    content.update(json.dumps([_task(prompt), seed, prompt.environment], default=str).encode())
    return content.hexdigest()
