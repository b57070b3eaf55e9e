"""What a rollout reports: per-row scalars and a few sample texts; the tokens stay with the worker."""

from typing import Literal

from pydantic import Field, NonNegativeInt, model_validator

from schemas.base import Frozen
from schemas.batch import ChunkRef
from schemas.metrics import Metrics
from schemas.store import StoreTraffic

FinishReason = Literal["stop", "length"]


class SampleText(Frozen):
    """One generated sample, for people to read."""

    prompt: str
    response: str
    answer: str
    reward: float | None


class RolloutShard(Frozen):
    """The rows that one rollout worker generated and scored for one step, in order. N rows."""

    shard: NonNegativeInt
    rewards: tuple[float | None, ...]  # N; None: the reward function failed
    group_ids: tuple[int, ...]  # N; rows of one prompt share a group
    prompt_lengths: tuple[int, ...]  # N, tokens
    response_lengths: tuple[int, ...]  # N, tokens
    loss_tokens: tuple[int, ...]  # N, true values of loss_mask
    finish_reasons: tuple[FinishReason, ...]  # N
    reward_parts: tuple[str, ...] = ()  # the names of the parts that some sample's reward has, sorted
    failure: str | None = None  # the first reward failure, as text
    samples: tuple[SampleText, ...] = ()
    metrics: Metrics = Field(default_factory=dict)

    @model_validator(mode="after")
    def _same_length(self) -> "RolloutShard":
        counts = {
            len(values)
            for values in (
                self.rewards,
                self.group_ids,
                self.prompt_lengths,
                self.response_lengths,
                self.loss_tokens,
                self.finish_reasons,
            )
        }
        if len(counts) != 1:
            raise ValueError(f"per-row scalars of one shard differ in length: {sorted(counts)}")
        return self


class RolloutHandle(Frozen):
    """One step's rollouts, by worker."""

    step: NonNegativeInt
    policy_version: NonNegativeInt
    shards: tuple[RolloutShard, ...]

    @property
    def num_rows(self) -> int:
        return sum(len(shard.rewards) for shard in self.shards)

    @property
    def reward_parts(self) -> tuple[str, ...]:
        return tuple(sorted({part for shard in self.shards for part in shard.reward_parts}))

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


class PutResult(Frozen):
    """What a worker stored: one chunk, and what a batch handle says of its columns."""

    chunk: ChunkRef
    dtypes: dict[str, str]  # column name -> str(Arrow value type)
    traffic: StoreTraffic
