"""Trajectories: the model's turns and an environment's answers, until one of them ends it.

The rows of a batch take their turns in waves: all rows sample their turn together, while the environments of rows that
have finished theirs already answer. So the same batch gives the same trajectories, bit for bit, however long the
environments take.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby

import numpy as np

from infra.datasets import PromptRow
from infra.engines.base import Generation, GenerationRequest, RolloutEngine, Sampling
from infra.environments.admission import Admission
from infra.environments.bridge import TurnBridge
from infra.environments.pool import EnvironmentPool, Reply
from infra.environments.trajectory import EpisodeEnd, Trajectory, TrajectoryBuilder
from rl_core.environments.base import Task
from rl_core.rollout.chat import ChatTemplate
from rl_core.rollout.seeding import derive_seed
from schemas.config.environment import EnvironmentConfig, ToolsEnvironment
from schemas.errors import ChatTemplateError

_TOOL_TIMEOUT = "error: the call took longer than {:g} s and was stopped"


class Episodes:
    """Plays trajectories.

    Args:
        config: The environment, and its limits.
        engine: Samples the model's turns.
        pool: Where the environments run.
        chat: The chat template.
        max_prompt_tokens: The longest prompt, with what an environment's reset adds to it.

    Raises:
        ChatTemplateError: The model's chat template can't continue a chat by turns.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        engine: RolloutEngine,
        pool: EnvironmentPool,
        chat: ChatTemplate,
        max_prompt_tokens: int,
    ) -> None:
        self._config, self._engine, self._pool, self._chat = config, engine, pool, chat
        self._max_prompt_tokens = max_prompt_tokens
        self._bridges: dict[str, TurnBridge] = {}
        self._bridge("tool" if isinstance(config, ToolsEnvironment) else "user")

    def begin(self, prompts: Sequence[PromptRow], seeds: Sequence[int]) -> list[PromptRow]:
        """Make and reset an environment for each of N rows; return their prompts, with what the resets add to them.

        The environments of an earlier batch end.

        Args:
            prompts: N prompts.
            seeds: The environments' seeds, N.
        """
        self._pool.end_all()
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            self._pool.open(number, Task(prompt=prompt.messages, answer=prompt.answer, info=prompt.info), seed)
        replies = self._pool.wait()
        self._failures: list[str | None] = []
        begun = []
        for number, prompt in enumerate(prompts):
            row, failure = self._with_reset(prompt, replies[number])
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
        builders = [
            TrajectoryBuilder(number, prompt.prompt_ids, seed, failure)
            for number, (prompt, seed, failure) in enumerate(zip(prompts, seeds, self._failures, strict=True))
        ]
        admission = Admission(self._config, self._pool)
        with closing(self._engine.open_rows(sampling, several_turns=True)) as rows:
            rows.begin(self._first_turns(builders, sampling))
            while rows.num_unfinished or admission.num_waiting:
                for number, turn in rows.step() if rows.num_unfinished else ():
                    row = builders[number]
                    if (end := self._end_of_turn(row, turn, sampling)) is not None:
                        rows.end(number)
                        yield self._finish(row, end)
                    else:
                        admission.await_answer(number, row.turns[-1].action)
                for number, reply in admission.admitted(rows.num_unfinished):
                    row = builders[number]
                    bridge, end = self._answer(row, reply, sampling.max_response_tokens)
                    if end is not None:
                        rows.end(number)
                        yield self._finish(row, end)
                    else:
                        row.add_bridge(bridge)
                        seed = derive_seed(row.seed, len(row.turns))
                        rows.extend(number, bridge, seed, self._turn_limit(row, sampling))

    def close(self) -> None:
        """End all environments and their processes."""
        self._pool.close()

    def _first_turns(self, rows: Sequence[TrajectoryBuilder], sampling: Sampling) -> list[GenerationRequest]:
        """Return the requests of all rows' first turns, in their order."""
        requests = []
        for _, members in groupby(rows, key=_shared_history):
            same = list(members)
            limit = self._turn_limit(same[0], sampling)
            requests.append(GenerationRequest(same[0].history, tuple(row.seed for row in same), limit))
        return requests

    def _turn_limit(self, row: TrajectoryBuilder, sampling: Sampling) -> int:
        if row.failure is not None:
            return 1
        left = sampling.max_response_tokens - row.num_tokens
        return min(left, self._config.max_turn_tokens or left)

    def _end_of_turn(self, row: TrajectoryBuilder, turn: Generation, sampling: Sampling) -> EpisodeEnd | None:
        """Add a turn to its row; return why the trajectory ends with it, or None."""
        ended = turn.finish_reason == "stop" and turn.token_ids[-1] in sampling.stop_token_ids
        row.add_turn(turn, self._text(turn.token_ids[:-1] if ended else turn.token_ids))
        if row.failure is not None:
            return "failed"
        if turn.finish_reason == "length":  # no environment answers half a turn
            return "length" if row.num_tokens >= sampling.max_response_tokens else "turn_length"
        return None

    def _answer(self, row: TrajectoryBuilder, reply: Reply, limit: int) -> tuple[np.ndarray, EpisodeEnd | None]:
        """Note an environment's answer in its row; return the tokens up to its next turn, and why it ends, or None."""
        nothing = np.empty(0, dtype=np.int64)
        observations, metrics = reply.observations, reply.metrics
        if reply.failure is not None:
            if not (isinstance(self._config, ToolsEnvironment) and reply.failure.kind == "timeout"):
                row.failure = f"turn {len(row.turns)}: {reply.failure.message}"
                return nothing, "failed"
            # What the model can cause must not take its row out of the training, or it learns to cause it.
            observations = (_TOOL_TIMEOUT.format(self._config.step_timeout_seconds),)
            metrics = {"tool_timeouts": 1.0}
        row.add_answer(observations, reply.reward, metrics, reply.seconds)
        if reply.done:
            return nothing, "done"
        if len(row.turns) >= self._config.max_turns:
            return nothing, "turns"
        try:
            bridge = self._bridge(reply.role).encode(observations, int(row.history[-1]))
        except ChatTemplateError as error:
            row.failure = f"turn {len(row.turns)}: {error}"
            return nothing, "failed"
        return bridge, "length" if row.num_tokens + len(bridge) >= limit else None

    def _finish(self, row: TrajectoryBuilder, end: EpisodeEnd) -> tuple[int, Trajectory]:
        self._pool.end(row.number)
        return row.number, row.finish(end)

    def _with_reset(self, prompt: PromptRow, reply: Reply) -> tuple[PromptRow, str | None]:
        """Return a row's prompt with what the reset has added to it, and why it failed, if it did."""
        if reply.failure is not None:
            return prompt, f"reset: {reply.failure.message}"
        if not reply.observations:
            return prompt, None
        messages = [*prompt.messages, *({"role": reply.role, "content": text} for text in reply.observations)]
        try:
            token_ids = self._chat.encode(messages)
        except ValueError as error:
            return prompt, f"reset: {error}"
        if len(token_ids) > self._max_prompt_tokens:
            return prompt, (
                f"reset: the prompt has {len(token_ids)} tokens with the environment's first message, more than "
                f"data.max_prompt_tokens = {self._max_prompt_tokens}"
            )
        text = "\n\n".join(message["content"] for message in messages)
        ids = np.array(token_ids, dtype=np.int32)
        return replace(prompt, prompt_ids=ids, prompt_text=text, messages=messages), None

    def _bridge(self, role: str) -> TurnBridge:
        if role not in self._bridges:
            self._bridges[role] = TurnBridge(self._chat, role, drops_reasoning=self._config.drops_reasoning)
        return self._bridges[role]

    def _text(self, token_ids: np.ndarray) -> str:
        return str(self._chat.tokenizer.decode(token_ids, skip_special_tokens=False))


def _shared_history(row: TrajectoryBuilder) -> tuple[bool, bytes]:
    """Return what neighbouring rows must share to be one request, whose prompt is prefilled once."""
    return row.failure is None, row.history.tobytes()
