"""What a rollout reports: per-row scalars and a few sample texts; the tokens stay with the worker."""

from collections.abc import Collection, Sequence
from typing import Literal

from pydantic import Field, NonNegativeInt, model_validator

from schemas.base import Frozen
from schemas.batch import ChunkRef
from schemas.catalog import REWARD_PART_PREFIX
from schemas.errors import RewardFailureError
from schemas.metrics import Max, Mean, Metrics, merge_metrics
from schemas.store import StoreTraffic

FinishReason = Literal["stop", "length"]

PER_ROW = ("rewards", "group_ids", "prompt_lengths", "response_lengths", "loss_tokens", "finish_reasons")


class SampleText(Frozen):
    """One generated sample, for people to read."""

    prompt: str
    response: str
    answer: str
    reward: float | None


class RolloutShard(Frozen):
    """The rows of the groups that one worker generated together, in order. N rows.

    Groups are generated again only together: in another batch, their last bits could differ.
    """

    shard: NonNegativeInt  # its number within the step
    worker: NonNegativeInt  # who holds its rows until they are put
    groups: tuple[NonNegativeInt, ...]  # all that were generated, ascending; their numbers within the step
    rewards: tuple[float | None, ...]  # N; None: the reward function failed
    group_ids: tuple[int, ...]  # N; rows of one prompt share a group
    prompt_lengths: tuple[int, ...]  # N, tokens
    response_lengths: tuple[int, ...]  # N, tokens
    loss_tokens: tuple[int, ...]  # N, true values of loss_mask
    finish_reasons: tuple[FinishReason, ...]  # N
    parts: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)  # N each; None: the row lacks this one
    failure: str | None = None  # the first reward failure, as text
    samples: tuple[SampleText, ...] = ()  # kept or not
    seconds: dict[str, float] = Field(default_factory=dict)  # by part of the work

    @model_validator(mode="after")
    def _same_length(self) -> "RolloutShard":
        counts = {len(getattr(self, name)) for name in PER_ROW} | {len(values) for values in self.parts.values()}
        if len(counts) != 1:
            raise ValueError(f"per-row scalars of one shard differ in length: {sorted(counts)}")
        return self

    @property
    def num_rows(self) -> int:
        return len(self.rewards)

    @property
    def kept(self) -> tuple[int, ...]:
        """The groups whose rows it has."""
        return tuple(dict.fromkeys(self.group_ids))

    def keep(self, groups: Collection[int]) -> "RolloutShard":
        """The shard without the rows of other groups than these."""
        rows = [row for row, group in enumerate(self.group_ids) if group in groups]
        parts = {name: tuple(values[row] for row in rows) for name, values in self.parts.items()}
        return self.replace(
            **{name: tuple(getattr(self, name)[row] for row in rows) for name in PER_ROW},
            parts={name: values for name, values in parts.items() if any(value is not None for value in values)},
        )


class RolloutHandle(Frozen):
    """One step's rollouts."""

    step: NonNegativeInt
    policy_version: NonNegativeInt  # the one that sampled
    shards: tuple[RolloutShard, ...]
    generated: Metrics = Field(default_factory=dict)  # of all that was generated, where groups may be dropped

    @property
    def metrics(self) -> Metrics:
        """The means of the reward's parts, how long the slowest worker took, staleness, and what was generated."""
        parts = [
            {REWARD_PART_PREFIX + name: Mean(total=sum(present), weight=len(present))}
            for shard in self.shards
            for name, values in shard.parts.items()
            if (present := [value for value in values if value is not None])
        ]
        staleness = Mean(total=(self.step - self.policy_version) * self.num_rows, weight=self.num_rows)
        return merge_metrics([*parts, self._seconds(), self.generated, {"rollout/staleness": staleness}])

    def _seconds(self) -> Metrics:
        by_worker: dict[int, list[RolloutShard]] = {}
        for shard in self.shards:
            by_worker.setdefault(shard.worker, []).append(shard)
        names = {name for shard in self.shards for name in shard.seconds}
        return {
            f"rollout/{name}_seconds": Max(
                value=max(sum(shard.seconds.get(name, 0.0) for shard in shards) for shards in by_worker.values())
            )
            for name in names
        }

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)

    @property
    def reward_parts(self) -> tuple[str, ...]:
        """The names of the parts that some row's reward has, sorted."""
        return tuple(sorted({part for shard in self.shards for part in shard.parts}))

    @property
    def rewards(self) -> tuple[float | None, ...]:
        return tuple(reward for shard in self.shards for reward in shard.rewards)

    @property
    def group_ids(self) -> tuple[int, ...]:
        return tuple(group for shard in self.shards for group in shard.group_ids)

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        return tuple(length for shard in self.shards for length in shard.prompt_lengths)

    @property
    def response_lengths(self) -> tuple[int, ...]:
        return tuple(length for shard in self.shards for length in shard.response_lengths)

    @property
    def loss_tokens(self) -> tuple[int, ...]:
        return tuple(count for shard in self.shards for count in shard.loss_tokens)


def check_failures(rewards: Sequence[float | None], failure: str | None, max_fraction: float, where: str) -> None:
    """Refuse to go on when too many rewards of `where` failed.

    Args:
        rewards: The rewards; None: it failed.
        failure: The first failure, as text.
        max_fraction: The most that may fail.
        where: What they are the rewards of.

    Raises:
        RewardFailureError: More than `max_fraction` of them failed, or all.
    """
    num_failed = sum(reward is None for reward in rewards)
    if num_failed and (num_failed > max_fraction * len(rewards) or num_failed == len(rewards)):
        raise RewardFailureError(
            f"{num_failed} of {len(rewards)} rewards of {where} failed; reward.max_failure_fraction = "
            f"{max_fraction} and at least one must succeed; the first failure: {failure}"
        )


class PutResult(Frozen):
    """What a worker stored: one chunk, and what a batch handle says of its columns."""

    chunk: ChunkRef
    dtypes: dict[str, str]  # column name -> str(Arrow value type)
    traffic: StoreTraffic
