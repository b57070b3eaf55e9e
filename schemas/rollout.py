"""The report of a rollout: per-row scalars and a few sample completions; the tokens stay with the worker."""

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
    """One generated sample, for users to read."""

    prompt: str
    response: str
    answer: str
    reward: float | None


class RolloutShard(Frozen):
    """The rows of the groups that one worker generated in one batch, in order. N rows.

    A retry regenerates these groups together: batched with others, the last bits of their log-probs could differ.
    """

    shard: NonNegativeInt  # number within the step
    worker: NonNegativeInt  # the worker that holds the rows until they are put
    groups: tuple[NonNegativeInt, ...]  # numbers of all generated groups within the step, ascending
    rewards: tuple[float | None, ...]  # N; None: the reward function failed
    group_ids: tuple[int, ...]  # N; all rows of a prompt have the same one
    prompt_lengths: tuple[int, ...]  # N, tokens
    response_lengths: tuple[int, ...]  # N, tokens
    loss_tokens: tuple[int, ...]  # N, true values of loss_mask
    finish_reasons: tuple[FinishReason, ...]  # N
    parts: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)  # N each; None: the row lacks this part
    failure: str | None = None  # message of the first reward failure
    samples: tuple[SampleText, ...] = ()  # of kept and dropped groups
    seconds: dict[str, float] = Field(default_factory=dict)  # by phase of the work

    @model_validator(mode="after")
    def _same_length(self) -> "RolloutShard":
        counts = {len(getattr(self, name)) for name in PER_ROW} | {len(values) for values in self.parts.values()}
        if len(counts) != 1:
            raise ValueError(f"per-row scalars of a shard have lengths {sorted(counts)}; expected one length")
        return self

    @property
    def num_rows(self) -> int:
        return len(self.rewards)

    @property
    def kept(self) -> tuple[int, ...]:
        """The groups whose rows the shard still has."""
        return tuple(dict.fromkeys(self.group_ids))

    def keep(self, groups: Collection[int]) -> "RolloutShard":
        """Return the shard with only the rows of `groups`."""
        rows = [row for row, group in enumerate(self.group_ids) if group in groups]
        parts = {name: tuple(values[row] for row in rows) for name, values in self.parts.items()}
        return self.replace(
            **{name: tuple(getattr(self, name)[row] for row in rows) for name in PER_ROW},
            parts={name: values for name, values in parts.items() if any(value is not None for value in values)},
        )


class RolloutHandle(Frozen):
    """One step's rollouts."""

    step: NonNegativeInt
    policy_version: NonNegativeInt  # of the weights that sampled
    shards: tuple[RolloutShard, ...]
    generated: Metrics = Field(default_factory=dict)  # over all generated groups, if some may have been dropped

    @property
    def metrics(self) -> Metrics:
        """Mean reward parts, seconds of the slowest worker by phase, staleness, and the metrics in `generated`."""
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
        """The names of all reward parts, sorted; a row may lack some of them."""
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
    """Check that no more rewards failed than the config allows.

    Args:
        rewards: The rewards; None: it failed.
        failure: Message of the first failure.
        max_fraction: The largest fraction that may fail.
        where: Names the rows in the error, e.g. "step 3".

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
    """One chunk that a worker stored, and the dtypes of its columns."""

    chunk: ChunkRef
    dtypes: dict[str, str]  # column name -> str(Arrow value type)
    traffic: StoreTraffic
