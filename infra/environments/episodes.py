"""Trajectories: the model's turns and an environment's answers, until one of them ends it.

While some rows sample, the environments of others answer; `environment.resume_rows` says when a row samples again.
In lockstep and by batch, the same batch gives the same trajectories, bit for bit, however long the environments take.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from infra.datasets import PromptRow
from infra.engines.base import DecodingRows, Generation, GenerationRequest, RolloutEngine, Sampling
from infra.environments.answers import Answers
from infra.environments.dialogue import Dialogue
from infra.environments.journal import Journal
from infra.environments.pool import EnvironmentPool
from infra.environments.program import write_turn
from infra.environments.slot import ALL_CALLS, Reply
from infra.environments.trajectory import EpisodeEnd, Trajectory, TrajectoryBuilder, TurnSampling
from rl_core.rollout.chat import decode_text
from rl_core.rollout.seeding import derive_seed
from schemas.config.environment import ProgramEnvironment, TurnLimits
from schemas.errors import ChatTemplateError

_TOOL_TIMEOUT = "error: the call took longer than {:g} s and was stopped"
_NO_TIME_LEFT = "error: no time is left for further calls"


class WaitingRows:
    """The rows of one batch that wait for their environments.

    Args:
        config: `resume_rows` and `lockstep_steps`.
        answers: Answers them.
    """

    def __init__(self, config: TurnLimits, answers: Answers) -> None:
        self._kind, self._num_steps, self._answers = config.resume_rows, config.lockstep_steps, answers
        self._due: dict[int, int] = {}  # the step at which each waiting row resumes at the latest
        self._step = 0

    def __len__(self) -> int:
        return len(self._due)

    def await_answer(self, row: int, action: str) -> None:
        """Have a row's environment answer an action."""
        self._answers.step(row, action)
        self._due[row] = self._step + self._num_steps

    def resumed(self, num_running: int) -> list[tuple[int, Reply]]:
        """Return the rows that sample on now with their environments' replies, after a decoding step.

        Args:
            num_running: The rows that sample meanwhile.
        """
        self._step += 1
        if not self._due:
            return []
        if self._kind == "as_ready":
            return self._taken(self._answers.poll(waits=num_running == 0))
        self._answers.receive()
        if self._kind == "batch":
            return self._taken(self._answers.wait()) if num_running == 0 else []
        if num_running == 0:  # nothing is lost by going on to the step at which the next one is due
            self._step = max(self._step, min(self._due.values()))
        due = [row for row, step in self._due.items() if step <= self._step]
        return self._taken(self._answers.wait(due)) if due else []

    def _taken(self, replies: dict[int, Reply]) -> list[tuple[int, Reply]]:
        for row in replies:
            del self._due[row]
        return sorted(replies.items())


class _Turns:
    """The turns of the trajectories that are decoded together: the engine samples them, or the journal has them.

    Args:
        rows: The engine's.
        requests: Returns the requests of the next turns of trajectories, in their order.
        answers: Has what is recorded, to be taken without the engine; None: all turns are sampled.
    """

    def __init__(
        self,
        rows: DecodingRows,
        requests: Callable[[Sequence[TrajectoryBuilder]], list[GenerationRequest]],
        answers: Answers | None,
    ) -> None:
        self._rows, self._requests, self._answers = rows, requests, answers
        self._by_place: dict[int, TrajectoryBuilder] = {}
        self._taken: list[tuple[TrajectoryBuilder, Generation]] = []

    @property
    def num_unfinished(self) -> int:
        """The number of turns that are being sampled, or were taken and not returned yet."""
        return self._rows.num_unfinished + len(self._taken)

    def begin(self, added: Sequence[TrajectoryBuilder]) -> None:
        """Begin the next turns of trajectories that the engine has no rows of."""
        turns = [None if self._answers is None else self._answers.next_turn(row.number) for row in added]
        self._taken += [(row, turn) for row, turn in zip(added, turns, strict=True) if turn is not None]
        if asked := [row for row, turn in zip(added, turns, strict=True) if turn is None]:
            for row, place in zip(asked, self._rows.begin(self._requests(asked)), strict=True):
                self._set_place(row, place)

    def go_on(self, row: TrajectoryBuilder, token_ids: np.ndarray, *, branches: bool) -> None:
        """Begin the next turn of a trajectory after these tokens, on the path of its newest turn or on another one."""
        if row.place < 0:
            self.begin([row])
            return
        (request,) = self._requests([row])
        if branches:
            self._set_place(row, self._rows.branch(row.place, request))
        else:
            assert request.max_tokens is not None, "each turn has a limit"
            self._rows.extend(row.place, token_ids, request.seeds[0], request.max_tokens, request.stop)

    def step(self) -> list[tuple[TrajectoryBuilder, Generation]]:
        """Return the turns that end with the next token, with their trajectories."""
        taken, self._taken = self._taken, []
        sampled = self._rows.step() if self._rows.num_unfinished else []
        return taken + [(self._by_place[place], turn) for place, turn in sampled]

    def end(self, row: TrajectoryBuilder) -> None:
        """Forget a trajectory."""
        if row.place >= 0:
            self._rows.end(row.place)

    def _set_place(self, row: TrajectoryBuilder, place: int) -> None:
        row.place, self._by_place[place] = place, row


class _Reset(NamedTuple):
    """How an environment's reset went."""

    failure: str | None = None
    seconds: float = 0.0
    requests: Mapping[str, float] | None = None
    asked: TurnSampling = TurnSampling()


class Episodes:
    """Plays trajectories. That of a row without an environment is a single turn.

    Args:
        dialogues: Of the run's environments, at least one, in their order in the pool; with the same `resume_rows`.
        engine: Samples the model's turns.
        pool: Where the environments run.
        tokenizer: The tokenizer of the engine's model.
        branch_fault: Returns why trajectories can't branch; None: they can.
    """

    def __init__(
        self,
        dialogues: Sequence[Dialogue],
        engine: RolloutEngine,
        pool: EnvironmentPool,
        tokenizer: PreTrainedTokenizerBase,
        branch_fault: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._dialogues, self._engine, self._pool, self._tokenizer = dialogues, engine, pool, tokenizer
        self._branch_fault = branch_fault

    def begin(
        self, prompts: Sequence[PromptRow], seeds: Sequence[int], journal: Journal | None = None
    ) -> list[PromptRow]:
        """Make and reset an environment for each of N rows; return their prompts, with what the resets add to them.

        The environments of an earlier batch end.

        Args:
            prompts: N prompts.
            seeds: The environments' seeds, N.
            journal: What was recorded of the same batch before, which environments are not asked again, and where
                their answers are recorded; None: nowhere.
        """
        self._answers = Answers(self._pool, journal)
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            self._answers.open(number, prompt, seed)
        replies = self._answers.wait()
        begun = [self._begun(prompt, replies.get(number)) for number, prompt in enumerate(prompts)]
        self._resets = [reset for _, reset in begun]
        return [prompt for prompt, _ in begun]

    def play(
        self, prompts: list[PromptRow], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Trajectory]]:
        """Yield the trajectory of each of the rows that have begun, with its number, as soon as it has ended.

        Turns that the journal has are taken from there, without the engine where that changes no bit of the others:
        which rows are decoded together affects the last bits.

        Args:
            prompts: The N prompts that `begin` returned. If a trajectory is restarted, its prompt may change.
            seeds: The seeds of their first turns, N; a later turn's seed is derived from it and the turn's number.
            sampling: How tokens are sampled; `max_response_tokens` is of all tokens after the prompt.
        """
        taken = self._play_back(prompts, seeds, sampling)
        yield from taken.items()
        if numbers := [number for number in range(len(prompts)) if number not in taken]:
            yield from self._decode(numbers, prompts, seeds, sampling)

    def close(self) -> None:
        """End all environments and their processes."""
        self._pool.close()

    def _play_back(
        self, prompts: Sequence[PromptRow], seeds: Sequence[int], sampling: Sampling
    ) -> dict[int, Trajectory]:
        """Return the trajectories that are taken from the journal whole, by number.

        If rows go on when they are answered, these are all that it has; else all or none, as their absence would change
        the last bits of the others.
        """
        found = {}
        for number in range(len(prompts)):
            row = self._builder(number, prompts[number], seeds[number])
            if (end := self._recorded_end(row, self._dialogue_of(prompts[number]), sampling)) is not None:
                found[number] = row.finish(end)
            elif not self._takes_turns:
                return {}
        for number in found:
            self._answers.end(number)
        return found

    @property
    def _takes_turns(self) -> bool:
        """Whether recorded turns are not sampled again, though that changes which rows are decoded together."""
        return self._dialogues[0].config.resume_rows == "as_ready"

    def _recorded_end(self, row: TrajectoryBuilder, dialogue: Dialogue | None, sampling: Sampling) -> EpisodeEnd | None:
        """Add what is recorded to a row; return why the trajectory ends, or None if the journal has not all of it."""
        for exchange in self._answers.recorded(row.number):
            assert exchange.turn is not None, "a reset is the first entry"
            if (end := self._end_of_turn(row, dialogue, exchange.turn, sampling)) is not None:
                return end
            if dialogue is None or exchange.reply is None:
                return None
            token_ids, parent, end = self._answer(row, dialogue, exchange.reply, sampling.max_response_tokens)
            if end is not None:
                return end
            row.add_environment_tokens(token_ids, parent)
        return None

    def _decode(
        self, numbers: Sequence[int], prompts: list[PromptRow], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Trajectory]]:
        """Play the trajectories of these rows with the engine."""
        builders = {number: self._builder(number, prompts[number], seeds[number]) for number in numbers}
        waiting = WaitingRows(self._dialogues[0].config, self._answers)

        def requests(rows: Sequence[TrajectoryBuilder]) -> list[GenerationRequest]:
            return self._requests(rows, [self._dialogue_of(prompts[row.number]) for row in rows], sampling)

        with closing(self._engine.open_rows(sampling, several_turns=True)) as rows:
            turns = _Turns(rows, requests, self._answers if self._takes_turns else None)
            turns.begin([*builders.values()])
            while turns.num_unfinished or len(waiting):
                for row, sampled in turns.step():
                    dialogue = self._dialogue_of(prompts[row.number])
                    turn = self._answers.add_turn(row.number, self._cut(row, sampled))
                    row.is_apart = not np.array_equal(turn.token_ids, sampled.token_ids)
                    if (end := self._end_of_turn(row, dialogue, turn, sampling)) is not None:
                        turns.end(row)
                        yield self._finish(row, end)
                    else:
                        assert dialogue is not None, "a row without an environment ends with its first turn"
                        waiting.await_answer(row.number, self._action(row, dialogue, turn))
                for number, reply in waiting.resumed(turns.num_unfinished):
                    row, dialogue = builders[number], self._dialogue_of(prompts[number])
                    assert dialogue is not None, "a row without an environment gets no answer"
                    if reply.failure is not None and reply.failure.kind == "differs":
                        turns.end(row)
                        prompts[number], self._resets[number] = self._begun(*self._answers.open_again(number))
                        builders[number] = self._builder(number, prompts[number], seeds[number], is_restarted=True)
                        turns.begin([builders[number]])
                        continue
                    token_ids, parent, end = self._answer(row, dialogue, reply, sampling.max_response_tokens)
                    if end is not None:
                        turns.end(row)
                        yield self._finish(row, end)
                        continue
                    turns.go_on(row, token_ids, branches=row.add_environment_tokens(token_ids, parent) or row.is_apart)

    def _begun(self, prompt: PromptRow, reply: Reply | None) -> tuple[PromptRow, _Reset]:
        """Return a row's prompt with what the reset has added to it, and how the reset went."""
        dialogue = self._dialogue_of(prompt)
        if dialogue is None or reply is None:
            return prompt, _Reset()
        prompt, failure = dialogue.begin(prompt, reply)
        try:
            asked = _asked(reply)
        except ChatTemplateError as error:
            asked, failure = TurnSampling(), f"reset: {error}"
        return prompt, _Reset(failure, reply.seconds, reply.requests, asked)

    def _builder(self, number: int, prompt: PromptRow, seed: int, *, is_restarted: bool = False) -> TrajectoryBuilder:
        failure, seconds, requests, asked = self._resets[number]
        return TrajectoryBuilder(
            number,
            prompt.prompt_ids,
            seed,
            failure,
            seconds,
            requests=requests,
            tools=prompt.tools,
            asked=asked,
            is_restarted=is_restarted,
        )

    def _dialogue_of(self, prompt: PromptRow) -> Dialogue | None:
        return None if prompt.environment is None else self._dialogues[prompt.environment]

    def _requests(
        self, rows: Sequence[TrajectoryBuilder], dialogues: Sequence[Dialogue | None], sampling: Sampling
    ) -> list[GenerationRequest]:
        """Return the requests of rows' next turns, in their order."""
        requests = []
        limits = [_turn_limit(row, dialogue, sampling) for row, dialogue in zip(rows, dialogues, strict=True)]
        limits = [min(limit, row.asked.max_tokens or limit) for row, limit in zip(rows, limits, strict=True)]
        # Neighbors that share tokens, limit and stop strings are one request, whose tokens are prefilled once.
        by_start = groupby(
            zip(rows, limits, strict=True), key=lambda each: (each[0].context.tobytes(), each[1], each[0].asked.stop)
        )
        for (_, limit, stop), members in by_start:
            same = [row for row, _ in members]
            seeds = tuple(derive_seed(row.seed, len(row.turns)) if row.turns else row.seed for row in same)
            requests.append(GenerationRequest(same[0].context, seeds, limit, stop))
        return requests

    def _end_of_turn(
        self, row: TrajectoryBuilder, dialogue: Dialogue | None, turn: Generation, sampling: Sampling
    ) -> EpisodeEnd | None:
        """Add a turn to its row; return why the trajectory ends with it, or None."""
        ended = turn.finish_reason == "stop" and turn.token_ids[-1] in sampling.stop_token_ids
        limit = _turn_limit(row, dialogue, sampling)
        row.add_turn(turn, self._text(turn.token_ids[:-1] if ended else turn.token_ids))
        if row.failure is not None:
            return "failed"
        is_asked = row.asked.max_tokens is not None and row.asked.max_tokens <= len(turn.token_ids) < limit
        if turn.finish_reason == "length" and not is_asked:  # no environment answers half a turn
            # A recorded one may have less than the limit, if its version stored more tokens of what came before.
            longest = dialogue.config.max_turn_tokens if dialogue else None
            is_longest = longest is not None and longest <= len(turn.token_ids)
            return "turn_length" if is_longest and row.num_tokens < sampling.max_response_tokens else "length"
        return "done" if dialogue is None else None

    def _cut(self, row: TrajectoryBuilder, turn: Generation) -> Generation:
        """Return a turn up to the token that completes a stop string of its request, if the engine has gone on."""

        def stops(size: int) -> bool:
            text = self._text(turn.token_ids[:size])
            return any(string in text for string in row.asked.stop)

        length = len(turn.token_ids)
        if not row.asked.stop or not stops(length):
            return turn
        return turn.beginning(1 + bisect_left(range(1, length), True, key=stops))

    def _action(self, row: TrajectoryBuilder, dialogue: Dialogue, turn: Generation) -> str:
        """Return what the environment gets of its row's newest turn: a program, without the stop string and after."""
        text, asked = row.turns[-1].action, row.asked
        if not isinstance(dialogue.config, ProgramEnvironment):
            return text
        end, stop = min(((at, stop) for stop in asked.stop if (at := text.find(stop)) >= 0), default=(len(text), ""))
        num_tokens, is_cut = len(turn.token_ids), turn.finish_reason == "length"
        texts = [self._text(turn.token_ids[at : at + 1]) for at in range(num_tokens)] if asked.logprobs else []
        logprobs = [*zip(texts, turn.logprobs.tolist(), strict=False)]
        before, parsed = row.context[: len(row.context) - num_tokens], None
        if dialogue.reads_turns:
            parsed = dialogue.parse(text[:end] if stop else self._text(turn.token_ids), self._text(before), row.tools)
            if parsed is not None and parsed["calls"] and (stop or is_cut):  # the last call may be half of one
                parsed = None
        ending = {"stop": stop, "is_cut": is_cut, "logprobs": logprobs, "parsed": parsed}
        return write_turn(text[:end], len(before), num_tokens, **ending)

    def _answer(
        self, row: TrajectoryBuilder, dialogue: Dialogue, reply: Reply, limit: int
    ) -> tuple[np.ndarray, int, EpisodeEnd | None]:
        """Note an environment's answer in its row; return what follows.

        These are the tokens up to its next turn; the number in its tokens of the one that they follow, or -1; and why
        it ends, or None.
        """
        nothing = np.empty(0, dtype=np.int64), -1
        if reply.failure is not None:
            if not (dialogue.has_tools and reply.failure.kind == "timeout"):
                row.add_call(reply)
                row.failure = f"turn {len(row.turns)}: {reply.failure.message}"
                return *nothing, "failed"
            # What the model can cause must not take its row out of the training, or it learns to cause it.
            text = _TOOL_TIMEOUT.format(dialogue.config.step_timeout_seconds)
            if reply.failure.message.startswith(ALL_CALLS):
                text = _NO_TIME_LEFT
            reply = replace(reply, observations=(text,), metrics={"tool_timeouts": 1.0}, failure=None)
        row.add_answer(reply)
        if reply.done:
            return *nothing, "done"
        if len(row.turns) >= dialogue.config.max_turns:
            return *nothing, "turns"
        try:
            token_ids, parent = self._continue(row, dialogue, reply)
        except ChatTemplateError as error:
            row.failure = f"turn {len(row.turns)}: {error}"
            return *nothing, "failed"
        return token_ids, parent, "length" if row.num_tokens + len(token_ids) >= limit else None

    def _continue(self, row: TrajectoryBuilder, dialogue: Dialogue, reply: Reply) -> tuple[np.ndarray, int]:
        """Return the tokens up to a row's next turn, and the number of the one that they follow, or -1."""
        row.asked = _asked(reply)
        if reply.roles:
            token_ids = dialogue.encode(reply)
            num_common, parent = row.find_beginning(token_ids)
            token_ids, row.tools = token_ids[num_common:], reply.tools
        else:
            if reply.after > len(row.turns):
                raise ChatTemplateError(f"the answer follows turn {reply.after}, but there are {len(row.turns)}")
            parent, row.tools = row.end_of(reply.after or len(row.turns))
            token_ids = dialogue.environment_tokens(reply.role, reply.observations, int(row.tokens[parent]), row.tools)
            if reply.after:
                num_common, parent = row.find_beginning(token_ids, parent)
                token_ids = token_ids[num_common:]
        if parent != len(row.tokens) - 1 and (fault := self._branch_fault()) is not None:
            raise ChatTemplateError(f"the trajectory branches, but {fault}")
        return token_ids, parent

    def _finish(self, row: TrajectoryBuilder, end: EpisodeEnd) -> tuple[int, Trajectory]:
        self._answers.end(row.number)
        return row.number, row.finish(end)

    def _text(self, token_ids: np.ndarray) -> str:
        return decode_text(self._tokenizer, token_ids)


def _turn_limit(row: TrajectoryBuilder, dialogue: Dialogue | None, sampling: Sampling) -> int:
    """Return the most tokens of a row's next turn, whatever its request says."""
    if row.failure is not None:
        return 1
    left = sampling.max_response_tokens - row.num_tokens
    return min(left, (dialogue.config.max_turn_tokens if dialogue else None) or left)


def _asked(reply: Reply) -> TurnSampling:
    """Return what an environment's answer says of the next turn; raises a `ChatTemplateError` if that is unknown."""
    try:
        return TurnSampling.model_validate_json(reply.sampling or "{}")
    except ValidationError as error:
        raise ChatTemplateError(f"the sampling {reply.sampling:.200} is not one of a turn: {error}") from error
