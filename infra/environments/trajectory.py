"""A trajectory: the turns of the model, what an environment answered to each, and what is reported of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PositiveInt

from infra.engines.base import Generation, SamplingMask
from infra.environments.slot import Reply
from rl_core.columns.jagged import turns_followed
from schemas.base import Frozen
from schemas.metrics import Max, Mean, Metrics, Sum

EpisodeEnd = Literal["done", "turns", "turn_length", "length", "failed"]
"""Why a trajectory ended: its environment said so; after `environment.max_turns`; the model's turn was cut off at
`environment.max_turn_tokens`; it has `rollout.max_response_tokens`, or no room for an observation and a further token;
or its environment failed."""


class TurnSampling(Frozen):
    """What a request says of its turn besides what the run's settings say.

    Attributes:
        stop: It ends with the token that completes one of these strings.
        max_tokens: The most tokens of it; None: as many as without a request.
        logprobs: Whether the answer has its log-probs.
    """

    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    max_tokens: PositiveInt | None = None
    logprobs: bool = False


_REQUESTS = ("requests/chat_completions", "requests/responses", "requests/messages")  # by `ModelApi.name`
_COUNTED = ("requests/repeated", "requests/refused", "requests/unrested")  # absent if none


@dataclass(frozen=True)
class Turn:
    """One turn of the model, and its answer."""

    num_tokens: int  # that the model sampled
    action: str  # the same as text, without the token that ended it
    num_environment_tokens: int = 0  # of the environment, that follow in the row
    observations: Sequence[str] = ()
    reward: float = 0.0


@dataclass(frozen=True)
class Trajectory(Generation):
    """The R tokens after a prompt: sampled by the model, or an environment's, whose log-probs are 0.

    If there is a sampling mask, an environment's tokens have none in it, which stands for all.
    """

    loss_mask: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=bool))  # bool [R]; the model's tokens
    turns: tuple[Turn, ...] = ()  # at least one
    parents: tuple[int, ...] = ()  # of each turn, see `rl_core.columns.jagged.Branches.parent`
    num_branches: int = 0  # turns that go on from another token than the one before them
    num_branch_tokens: int = 0  # of those that begin a branch, up to the model's turn
    end: EpisodeEnd = "done"
    failure: str | None = None  # the environment's
    metrics: Mapping[str, float] = field(default_factory=dict)  # the environment's, summed over the turns
    environment_seconds: float = 0.0
    requests: tuple[Mapping[str, float], ...] = ()  # of each answer that has some, see `Reply.requests`
    num_recorded: int = 0  # answers that were taken from the journal
    is_restarted: bool = False  # whether it was restarted, as its environment answered otherwise than recorded

    @property
    def reward(self) -> float:
        """The sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def last_turn_ids(self) -> np.ndarray:
        """The tokens of the model's last turn: int32."""
        turn = self.turns[-1]
        return self.token_ids[len(self.token_ids) - turn.num_tokens - turn.num_environment_tokens :][: turn.num_tokens]

    @property
    def feedback(self) -> str:
        """What the environment answered to the last turn; empty if nothing."""
        return "\n\n".join(self.turns[-1].observations)

    def reward_info(self) -> dict[str, Any]:
        """Return what a reward function gets in `info`, in addition to the data row's own."""
        sampled = [turn.num_tokens for turn in self.turns]
        after = turns_followed(sampled, [turn.num_environment_tokens for turn in self.turns], self.parents)
        turns = [
            {
                "action": turn.action,
                "observations": list(turn.observations),
                "reward": turn.reward,
                "after": number,
            }
            for turn, number in zip(self.turns, after, strict=True)
        ]
        return {"turns": turns, "environment_reward": self.reward, "end": self.end}


class TrajectoryBuilder:
    """A trajectory that is under way.

    Args:
        number: The number of its row in a batch.
        prompt_ids: Integers [P], its prompt.
        seed: The seed of its first turn.
        failure: Why its environment can't be used; None: it can.
        seconds: Time that the environment's reset took.
        requests: What the reset has counted of requests to the model.
        tools: JSON of the tools that it has added to the chat template; empty: none.
        asked: What it says of the first turn; None: nothing.
        is_restarted: Whether it is restarted, as its environment answered otherwise than recorded.

    Attributes:
        place: The number of its row in the engine, once it has one.
        is_apart: Whether its newest turn is another one than that of its row in the engine.
        tools: Those of the chat of its next turn.
        asked: What the request says of that turn; of a turn that has been added, still the same.
    """

    def __init__(
        self,
        number: int,
        prompt_ids: np.ndarray,
        seed: int,
        failure: str | None,
        seconds: float = 0.0,
        *,
        requests: Mapping[str, float] | None = None,
        tools: str = "",
        asked: TurnSampling | None = None,
        is_restarted: bool = False,
    ) -> None:
        self.number, self.seed, self.failure, self.place, self.tools = number, seed, failure, -1, tools
        self.is_apart, self.asked = False, asked or TurnSampling()
        self.tokens = np.asarray(prompt_ids, dtype=np.int64)  # [P + R], prompt and tokens so far, of all branches
        self.turns: list[Turn] = []
        self._branches = [(0, -1)]  # where in `tokens` the tokens of each begin, and the one that they go on from
        self._parents = [-1]  # of each turn, and of the next one, as `Trajectory.parents`
        self._ends: list[tuple[int, str]] = []  # of each turn, its last token in `tokens`, and its chat's tools
        self._num_prompt = len(self.tokens)
        self._logprobs: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._sampling_masks: list[SamplingMask | None] = []
        self._metrics: Counter[str] = Counter()
        self._seconds, self._num_recorded, self._is_anew = seconds, 0, is_restarted
        self._requests = [requests] if requests else []
        self._num_branch_tokens = 0

    @property
    def num_tokens(self) -> int:
        """The tokens after the prompt."""
        return len(self.tokens) - self._num_prompt

    @property
    def context(self) -> np.ndarray:
        """The tokens that the next turn follows: integers [L]."""
        start, parent = self._branches[-1]
        return self.tokens[self._path_to(parent if start == len(self.tokens) else len(self.tokens) - 1)]

    def end_of(self, turn: int) -> tuple[int, str]:
        """Return the last token of a turn, the first being 1, as a number in `tokens`; and the tools of its chat."""
        return self._ends[turn - 1]

    def find_beginning(self, token_ids: np.ndarray, after: int = -1) -> tuple[int, int]:
        """Return how many tokens a chat has in common with the beginning of an earlier one, at most.

        Args:
            token_ids: Integers [L], the chat, or the end of it.
            after: The number in `tokens` of the token that they follow; -1: they are all of the chat.

        Returns:
            How many of `token_ids`, and the number of the last common token in `tokens`; -1: there is none.
        """
        before = self._path_to(after)
        token_ids = np.concatenate([self.tokens[before], token_ids])
        following = [start for start, _ in self._branches[1:]]
        ends = sorted({*(start - 1 for start in following), len(self.tokens) - 1})
        best = len(before), after
        for end in ends:
            path = self._path_to(end)
            size = min(len(path), len(token_ids))
            same = self.tokens[path[:size]] == token_ids[:size]
            length = size if same.all() else int(same.argmin())
            if length > best[0]:
                best = length, int(path[length - 1])
        return best[0] - len(before), best[1]

    def _path_to(self, end: int) -> np.ndarray:
        """Return the numbers of the tokens up to one of `tokens`, on its path."""
        parts = []
        while end >= 0:
            start, parent = next(branch for branch in reversed(self._branches) if branch[0] <= end)
            parts.append(np.arange(start, end + 1))
            end = parent
        return np.concatenate([np.empty(0, dtype=np.int64), *reversed(parts)])

    def add_turn(self, generation: Generation, action: str) -> None:
        """Add what the model has sampled."""
        self._append(generation.token_ids, generation.logprobs, generation.sampling_mask, is_sampled=True)
        self.turns.append(Turn(len(generation.token_ids), action))
        self._ends.append((len(self.tokens) - 1, self.tools))

    def add_answer(self, reply: Reply) -> None:
        """Note what the environment answered to the newest turn."""
        turn = self.turns[-1]
        self.turns[-1] = Turn(turn.num_tokens, turn.action, 0, reply.news, reply.reward)
        self._metrics.update(reply.metrics)
        self.add_call(reply)
        self._num_recorded += reply.is_recorded

    def add_call(self, reply: Reply) -> None:
        """Count the time and the requests of an environment's call, whether it has an answer or failed."""
        self._seconds += reply.seconds
        if reply.requests:
            self._requests.append(reply.requests)

    def add_environment_tokens(self, token_ids: np.ndarray, parent: int) -> bool:
        """Add the tokens between a turn and the next one; return whether they begin a branch.

        Args:
            token_ids: Integers [B].
            parent: The number of the token in `tokens` that they follow; -1: none.
        """
        if branches := parent != len(self.tokens) - 1:
            self._branches.append((len(self.tokens), parent))
            self._num_branch_tokens += len(token_ids)
        self._parents.append(parent - self._num_prompt)
        everything = SamplingMask(np.zeros(len(token_ids), dtype=np.int32), np.empty(0, dtype=np.int32))
        self._append(token_ids, np.zeros(len(token_ids), dtype=np.float32), everything, is_sampled=False)
        turn = self.turns[-1]
        self.turns[-1] = Turn(turn.num_tokens, turn.action, len(token_ids), turn.observations, turn.reward)
        return branches

    def finish(self, end: EpisodeEnd) -> Trajectory:
        """Return the trajectory."""
        return Trajectory(
            token_ids=self.tokens[self._num_prompt :].astype(np.int32),
            logprobs=np.concatenate(self._logprobs),
            finish_reason="stop" if end == "done" else "length",
            sampling_mask=_joined(self._sampling_masks),
            loss_mask=np.concatenate(self._masks),
            turns=tuple(self.turns),
            parents=tuple(self._parents[: len(self.turns)]),
            num_branches=len(self._branches) - 1,
            num_branch_tokens=self._num_branch_tokens,
            end=end,
            failure=self.failure,
            metrics=dict(self._metrics),
            environment_seconds=self._seconds,
            requests=tuple(self._requests),
            num_recorded=self._num_recorded,
            is_restarted=self._is_anew,
        )

    def _append(
        self, token_ids: np.ndarray, logprobs: np.ndarray, mask: SamplingMask | None, *, is_sampled: bool
    ) -> None:
        self.tokens = np.concatenate([self.tokens, token_ids])
        self._logprobs.append(logprobs)
        self._masks.append(np.full(len(token_ids), is_sampled))
        self._sampling_masks.append(mask)


def _joined(masks: Sequence[SamplingMask | None]) -> SamplingMask | None:
    """Return the mask of the tokens of several, one after another; None if the sampling doesn't keep it."""
    kept = [mask for mask in masks if mask is not None]
    if len(kept) < len(masks):
        return None
    counts, token_ids = [mask.counts for mask in kept], [mask.token_ids for mask in kept]
    return SamplingMask(np.concatenate(counts), np.concatenate(token_ids))


def describe(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the metrics of trajectories that depend on nothing but their tokens and environments."""
    if not trajectories:
        return {}
    count = len(trajectories)
    between = sum(int((~trajectory.loss_mask).sum()) for trajectory in trajectories)
    ends = Counter(trajectory.end for trajectory in trajectories)
    own = Counter[str]()
    for trajectory in trajectories:
        own.update(trajectory.metrics)
    return {
        "turns": Mean(total=sum(len(trajectory.turns) for trajectory in trajectories), weight=count),
        "turns/environment_tokens": Mean(total=between, weight=count),
        "turns/branches": Mean(total=sum(trajectory.num_branches for trajectory in trajectories), weight=count),
        "turns/branch_tokens": Mean(
            total=sum(trajectory.num_branch_tokens for trajectory in trajectories), weight=count
        ),
        "turns/failed": Sum(value=ends["failed"]),
        **{f"turns/ended_{end}": Mean(total=ends[end], weight=count) for end in ends},
        **{f"environment/{name}": Mean(total=total, weight=count) for name, total in own.items()},
    }


def measure(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the seconds that the environments took, what they asked, and what the journal spared them, if it did."""
    if not trajectories:
        return {}
    seconds = [trajectory.environment_seconds for trajectory in trajectories]
    replayed = {
        "turns/recorded": sum(trajectory.num_recorded for trajectory in trajectories),
        "turns/restarted": sum(trajectory.is_restarted for trajectory in trajectories),
    }
    return {
        "turns/environment_seconds": Mean(total=sum(seconds), weight=len(seconds)),
        "turns/environment_seconds_max": Max(value=max(seconds)),
        **{name: Sum(value=count) for name, count in replayed.items() if count},
        **_measure_requests(trajectories),
    }


def _measure_requests(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return how environments asked their model, and how long they waited for its turns; nothing if none did."""
    asking = [trajectory for trajectory in trajectories if trajectory.requests]
    found = [requests for trajectory in asking for requests in trajectory.requests]
    seconds = [requests["seconds"] for requests in found if "seconds" in requests]
    counts = Counter[str]()
    for requests in found:
        counts.update({f"requests/{name}": int(count) for name, count in requests.items() if name != "seconds"})
    sums = {name: Sum(value=counts.pop(name)) for name in _COUNTED if name in counts}
    waits: Metrics = {}
    if seconds:
        waits["requests/seconds"] = Mean(total=sum(seconds), weight=len(seconds))
        waits["requests/seconds_max"] = Max(value=max(seconds))
    apis = {name: Mean(total=counts[name], weight=len(asking)) for name in _REQUESTS if asking}  # 0 counts, too
    return {**apis, **sums, **waits}
