"""Trajectories: the model's turns and an environment's answers, until one of them ends it.

The rows of a batch take their turns in waves: all rows sample their turn together, while the environments of rows that
have finished theirs already answer. So the same batch gives the same trajectories, bit for bit, however long the
environments take.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby

import numpy as np
from transformers import PreTrainedTokenizerBase

from infra.datasets import PromptRow
from infra.engines.base import Generation, GenerationRequest, RolloutEngine, Sampling
from infra.environments.admission import Admission
from infra.environments.dialogue import Dialogue
from infra.environments.pool import EnvironmentPool, Reply
from infra.environments.trajectory import EpisodeEnd, Trajectory, TrajectoryBuilder
from rl_core.environments.base import Task
from rl_core.rollout.seeding import derive_seed
from schemas.errors import ChatTemplateError

_TOOL_TIMEOUT = "error: the call took longer than {:g} s and was stopped"


class Episodes:
    """Plays trajectories. That of a row without an environment is a single turn.

    Args:
        dialogues: Of the run's environments, at least one, in their order in the pool; they have the same admission.
        engine: Samples the model's turns.
        pool: Where the environments run.
        tokenizer: The tokenizer of the engine's model.
    """

    def __init__(
        self,
        dialogues: Sequence[Dialogue],
        engine: RolloutEngine,
        pool: EnvironmentPool,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._dialogues, self._engine, self._pool, self._tokenizer = dialogues, engine, pool, tokenizer

    def begin(self, prompts: Sequence[PromptRow], seeds: Sequence[int]) -> list[PromptRow]:
        """Make and reset an environment for each of N rows; return their prompts, with what the resets add to them.

        The environments of an earlier batch end.

        Args:
            prompts: N prompts.
            seeds: The environments' seeds, N.
        """
        self._pool.end_all()
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            if prompt.environment is not None:
                task = Task(prompt=prompt.messages, answer=prompt.answer, info=prompt.info)
                self._pool.open(number, task, seed, prompt.environment)
        replies = self._pool.wait()
        self._failures: list[str | None] = []
        begun = []
        for number, prompt in enumerate(prompts):
            dialogue = self._dialogue_of(prompt)
            row, failure = dialogue.begin(prompt, replies[number]) if dialogue else (prompt, None)
            begun.append(row)
            self._failures.append(failure)
        return begun

    def play(
        self, prompts: Sequence[PromptRow], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Trajectory]]:
        """Yield the trajectory of each of the rows that have begun, with its number, as soon as it has ended.

        Args:
            prompts: The N prompts that `begin` returned.
            seeds: The seeds of their first turns, N; a later turn's seed is derived from it and the turn's number.
            sampling: How tokens are sampled; `max_response_tokens` is of all tokens after the prompt.
        """
        dialogues = [self._dialogue_of(prompt) for prompt in prompts]
        builders = [
            TrajectoryBuilder(number, prompt.prompt_ids, seed, failure)
            for number, (prompt, seed, failure) in enumerate(zip(prompts, seeds, self._failures, strict=True))
        ]
        admission = Admission(self._dialogues[0].config, self._pool)
        with closing(self._engine.open_rows(sampling, several_turns=True)) as rows:
            rows.begin(self._first_turns(builders, dialogues, sampling))
            while rows.num_unfinished or admission.num_waiting:
                for number, turn in rows.step() if rows.num_unfinished else ():
                    row, dialogue = builders[number], dialogues[number]
                    if (end := self._end_of_turn(row, dialogue, turn, sampling)) is not None:
                        rows.end(number)
                        yield self._finish(row, dialogue, end)
                    else:
                        admission.await_answer(number, row.turns[-1].action)
                for number, reply in admission.admitted(rows.num_unfinished):
                    row, dialogue = builders[number], dialogues[number]
                    assert dialogue is not None, "a row without an environment gets no answer"
                    bridge, end = self._answer(row, dialogue, reply, sampling.max_response_tokens)
                    if end is not None:
                        rows.end(number)
                        yield self._finish(row, dialogue, end)
                    else:
                        row.add_bridge(bridge)
                        seed = derive_seed(row.seed, len(row.turns))
                        rows.extend(number, bridge, seed, _turn_limit(row, dialogue, sampling))

    def close(self) -> None:
        """End all environments and their processes."""
        self._pool.close()

    def _dialogue_of(self, prompt: PromptRow) -> Dialogue | None:
        return None if prompt.environment is None else self._dialogues[prompt.environment]

    def _first_turns(
        self, rows: Sequence[TrajectoryBuilder], dialogues: Sequence[Dialogue | None], sampling: Sampling
    ) -> list[GenerationRequest]:
        """Return the requests of all rows' first turns, in their order."""
        requests = []
        limits = [_turn_limit(row, dialogue, sampling) for row, dialogue in zip(rows, dialogues, strict=True)]
        # Neighbors that share prompt and limit are one request, whose prompt is prefilled once.
        for (_, limit), members in groupby(rows, key=lambda row: (row.history.tobytes(), limits[row.number])):
            same = list(members)
            requests.append(GenerationRequest(same[0].history, tuple(row.seed for row in same), limit))
        return requests

    def _end_of_turn(
        self, row: TrajectoryBuilder, dialogue: Dialogue | None, turn: Generation, sampling: Sampling
    ) -> EpisodeEnd | None:
        """Add a turn to its row; return why the trajectory ends with it, or None."""
        ended = turn.finish_reason == "stop" and turn.token_ids[-1] in sampling.stop_token_ids
        row.add_turn(turn, self._text(turn.token_ids[:-1] if ended else turn.token_ids))
        if row.failure is not None:
            return "failed"
        if turn.finish_reason == "length":  # no environment answers half a turn
            return "length" if row.num_tokens >= sampling.max_response_tokens else "turn_length"
        return "done" if dialogue is None else None

    def _answer(
        self, row: TrajectoryBuilder, dialogue: Dialogue, reply: Reply, limit: int
    ) -> tuple[np.ndarray, EpisodeEnd | None]:
        """Note an environment's answer in its row; return the tokens up to its next turn, and why it ends, or None."""
        nothing = np.empty(0, dtype=np.int64)
        observations, metrics = reply.observations, reply.metrics
        if reply.failure is not None:
            if not (dialogue.has_tools and reply.failure.kind == "timeout"):
                row.failure = f"turn {len(row.turns)}: {reply.failure.message}"
                return nothing, "failed"
            # What the model can cause must not take its row out of the training, or it learns to cause it.
            observations = (_TOOL_TIMEOUT.format(dialogue.config.step_timeout_seconds),)
            metrics = {"tool_timeouts": 1.0}
        row.add_answer(observations, reply.reward, metrics, reply.seconds)
        if reply.done:
            return nothing, "done"
        if len(row.turns) >= dialogue.config.max_turns:
            return nothing, "turns"
        try:
            bridge = dialogue.bridge(reply.role, observations, int(row.history[-1]))
        except ChatTemplateError as error:
            row.failure = f"turn {len(row.turns)}: {error}"
            return nothing, "failed"
        return bridge, "length" if row.num_tokens + len(bridge) >= limit else None

    def _finish(self, row: TrajectoryBuilder, dialogue: Dialogue | None, end: EpisodeEnd) -> tuple[int, Trajectory]:
        if dialogue is not None:
            self._pool.end(row.number)
        return row.number, row.finish(end)

    def _text(self, token_ids: np.ndarray) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


def _turn_limit(row: TrajectoryBuilder, dialogue: Dialogue | None, sampling: Sampling) -> int:
    if row.failure is not None:
        return 1
    left = sampling.max_response_tokens - row.num_tokens
    return min(left, (dialogue.config.max_turn_tokens if dialogue else None) or left)
