"""The report of a rollout: per-row scalars and a few sample completions; the tokens stay with the worker.

And what a curriculum knows: which sources a step takes its prompts from, and how well it did on each. K sources.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, model_validator

from schemas.base import Frozen
from schemas.batch import BatchHandle, ChunkRef, EncodedInts, StoreTraffic
from schemas.catalog import REWARD_PART_PREFIX
from schemas.errors import RewardFailureError
from schemas.metrics import Max, Mean, Metrics, merge_metrics
from schemas.packed import Packed, PackedFloats, PackedInts

FinishReason = Literal["stop", "length"]


class SourceSchedule(Frozen):
    """How often a step takes a prompt from each source, and where each source stands before the step."""

    shares: tuple[NonNegativeInt, ...]  # K, in millionths of the step's prompts; their sum is 1,000,000
    credits: tuple[int, ...]  # K, in millionths of a prompt: what earlier steps owe each source; their sum is 0
    positions: tuple[NonNegativeInt, ...]  # K, the number of prompts that earlier steps took from each source


class SourceResults(Frozen):
    """A step's schedule, and how many of its samples were successes; groups that it dropped are counted."""

    schedule: SourceSchedule
    num_scored: tuple[NonNegativeInt, ...]  # K, samples whose reward did not fail
    num_successes: tuple[NonNegativeInt, ...]  # K, those of them whose reward reaches the threshold


MAX_TEXT = 300  # characters of a sample's text


class SampleText(Frozen):
    """One generated sample, for users to read: the end of its prompt, and the beginning of the other texts."""

    prompt: Annotated[str, AfterValidator(lambda text: text[-MAX_TEXT:])]
    response: Annotated[str, AfterValidator(lambda text: text[:MAX_TEXT])]
    answer: Annotated[str, AfterValidator(lambda text: text[:MAX_TEXT])]
    reward: float | None
    tree: str = ""  # of its turns, if it has several, see `infra.history.row_tokens.tree_of`


class PartialGroups(Frozen):
    """Rows of groups that are under way, stored: the step that will train on them, and their columns so far."""

    step: NonNegativeInt
    batch: BatchHandle


class ReusedGroup(Frozen):
    """A group that an earlier step sampled, or one of another run."""

    step: NonNegativeInt
    group: NonNegativeInt  # its number within that step

    @classmethod
    def of(cls, sample_id: str) -> "ReusedGroup":
        """Return the group that a sample's id names.

        Example:
            >>> ReusedGroup.of(make_sample_id(3, 5, 0))
            ReusedGroup(step=3, group=5)
        """
        step, group, _ = sample_id.split("-")
        return cls(step=int(step), group=int(group))


def make_sample_id(step: int, group: int, number: int) -> str:
    """Return the id of a sample: its step, its group's number within the step, and its own within the group."""
    return f"{step}-{group}-{number}"


class RolloutShard(Frozen):
    """The rows of the groups that one worker generated in one batch, in order. N rows.

    A retry regenerates these groups together: batched with others, the last bits of their log-probs could differ.

    Every packed field has one number per row, and is cut with the rows (`PER_ROW`); the rewards of turns alone have one
    per turn. A packed field with a default is empty in shards that don't have it.
    """

    shard: NonNegativeInt  # number within the step
    worker: NonNegativeInt  # the worker that holds the rows until they are put
    groups: tuple[NonNegativeInt, ...]  # numbers of all generated groups within the step, ascending
    rewards: PackedFloats  # N; None: the reward function failed
    group_ids: PackedInts  # N; all rows of a prompt have the same one
    prompt_lengths: PackedInts  # N, tokens
    response_lengths: PackedInts  # N, tokens
    loss_tokens: PackedInts  # N, true values of loss_mask
    truncated: PackedInts  # N; 1: the response was cut off by the token limit, 0: it is complete
    num_turns: PackedInts = PackedInts()  # N; none if no environment answers
    turn_rewards: PackedFloats = PackedFloats()  # of all rows' turns, row by row
    pairs_apart: PackedFloats = PackedFloats()  # N, of tokens on different branches of a row; none if no row branches
    prefixes: PackedInts = PackedInts()  # N; rows with the same number begin with the same tokens; none if no rows do
    prefix_lengths: PackedInts = PackedInts()  # N, these tokens
    parts: dict[str, PackedFloats] = Field(default_factory=dict)  # N each; None: the row lacks this part
    token_lag: NonNegativeInt | None = None  # the sum over tokens of step - version, if several versions sampled
    begun: tuple[PartialGroups, ...] = ()  # what it continued, of its own step and later ones
    unfinished: tuple[PartialGroups, ...] = ()  # of later steps: what the next rollout continues
    reused: tuple[ReusedGroup, ...] = ()  # where `groups` come from, each, if they were not sampled in this step
    failure: str | None = None  # message of the first reward failure
    failures: dict[str, str] = Field(default_factory=dict)  # of failed rewards, dropped groups included: by sample id
    samples: tuple[SampleText, ...] = ()  # of kept and dropped groups
    seconds: dict[str, float] = Field(default_factory=dict)  # by phase of the work
    turns: Metrics = Field(default_factory=dict)  # of its trajectories, if an environment answers
    telemetry: Metrics = Field(default_factory=dict)  # of its generation

    @model_validator(mode="after")
    def _same_length(self) -> "RolloutShard":
        columns = {name: getattr(self, name) for name in PER_ROW} | {f"parts.{n}": v for n, v in self.parts.items()}
        lengths = {name: len(values) for name, values in columns.items() if values or name not in OPTIONAL_PER_ROW}
        if wrong := {name: length for name, length in lengths.items() if length != self.num_rows}:
            raise ValueError(f"per-row scalars of a shard of {self.num_rows} rows have other lengths: {wrong}")
        if sum(self.num_turns) != len(self.turn_rewards):
            raise ValueError(
                f"{len(self.turn_rewards)} rewards of {sum(self.num_turns)} turns in {self.num_rows} rows; expected "
                "one of each turn"
            )
        if len(self.reused) not in (0, len(self.groups)):
            raise ValueError(
                f"{len(self.reused)} of {len(self.groups)} groups of a shard are reused; expected all or none"
            )
        return self

    @property
    def num_rows(self) -> int:
        return len(self.rewards)

    @property
    def has_lag(self) -> bool:
        """Whether the versions that sampled its rows are those of the run itself."""
        return not self.reused or self.token_lag is not None

    @property
    def kept(self) -> tuple[int, ...]:
        """The groups whose rows the shard still has."""
        return tuple(dict.fromkeys(self.group_ids))

    def keep(self, groups: Collection[int]) -> "RolloutShard":
        """Return the shard with only the rows of `groups`."""
        if all(group in groups for group in self.groups):
            return self
        rows = [row for row, group in enumerate(self.group_ids) if group in groups]
        columns = {name: values for name in PER_ROW if (values := getattr(self, name))}  # optional ones may be empty
        parts = {name: tuple(values[row] for row in rows) for name, values in self.parts.items()}
        ends = list(accumulate(self.num_turns))
        turns = [(ends[row] - self.num_turns[row], ends[row]) for row in rows] if ends else []
        return self.replace(
            **{name: tuple(values[row] for row in rows) for name, values in columns.items()},
            turn_rewards=tuple(reward for start, end in turns for reward in self.turn_rewards[start:end]),
            parts={name: values for name, values in parts.items() if any(value is not None for value in values)},
        )


# Of the fields of a shard: those with one number per row, and those of them that a shard may lack.
_PACKED = {
    name: field
    for name, field in RolloutShard.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Packed)
}
PER_ROW = tuple(name for name in _PACKED if name != "turn_rewards")
OPTIONAL_PER_ROW = tuple(name for name in PER_ROW if not _PACKED[name].is_required())


class RolloutHandle(Frozen):
    """One step's rollouts."""

    step: NonNegativeInt
    policy_version: NonNegativeInt  # of the weights that sampled, the newest if several did
    shards: tuple[RolloutShard, ...]
    generated: Metrics = Field(default_factory=dict)  # over all generated groups, if some may have been dropped
    sources: SourceResults | None = None  # if there is a curriculum

    @property
    def metrics(self) -> Metrics:
        """Mean reward parts, turns, seconds of the slowest worker by phase, staleness, and `generated`."""
        parts = [
            {REWARD_PART_PREFIX + name: Mean(total=sum(present), weight=len(present))}
            for shard in self.sampled.shards
            for name, values in shard.parts.items()
            if (present := values.present)
        ]
        turns = [shard.turns for shard in self.shards]
        return merge_metrics(
            [*parts, *turns, self._seconds(), self.generated, {"rollout/staleness": self._staleness()}]
        )

    def _staleness(self) -> Mean:
        """Return the mean lag over rows, or over tokens if it differs among them; another run's rows have none."""
        lag, own = self.step - self.policy_version, [shard for shard in self.shards if shard.has_lag]
        if all(shard.token_lag is None for shard in own):
            num_rows = sum(shard.num_rows for shard in own)
            return Mean(total=lag * num_rows, weight=num_rows)
        tokens = [sum(shard.response_lengths) for shard in own]
        lags = [
            lag * count if shard.token_lag is None else shard.token_lag
            for shard, count in zip(own, tokens, strict=True)
        ]
        return Mean(total=sum(lags), weight=sum(tokens))

    @property
    def sampled(self) -> "RolloutHandle":
        """The same without reused groups, whose rows are the last ones."""
        return self.replace(shards=tuple(shard for shard in self.shards if not shard.reused))

    @property
    def telemetry(self) -> Metrics:
        """Measurements of all shards' generation, dropped groups included."""
        return merge_metrics(shard.telemetry for shard in self.shards)

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

    def part(self, name: str) -> PackedFloats:
        """Return one part of the rewards of all rows; None: the row lacks it."""
        lacking = ((None,) * shard.num_rows for shard in self.shards)
        return PackedFloats.concat(
            shard.parts.get(name, PackedFloats(nothing)) for shard, nothing in zip(self.shards, lacking, strict=True)
        )

    @property
    def rewards(self) -> PackedFloats:
        return PackedFloats.concat(shard.rewards for shard in self.shards)

    @property
    def group_ids(self) -> PackedInts:
        return PackedInts.concat(shard.group_ids for shard in self.shards)

    @property
    def prompt_lengths(self) -> PackedInts:
        return PackedInts.concat(shard.prompt_lengths for shard in self.shards)

    @property
    def response_lengths(self) -> PackedInts:
        return PackedInts.concat(shard.response_lengths for shard in self.shards)

    @property
    def loss_tokens(self) -> PackedInts:
        return PackedInts.concat(shard.loss_tokens for shard in self.shards)

    @property
    def num_turns(self) -> PackedInts:
        return PackedInts.concat(shard.num_turns for shard in self.shards)

    @property
    def turn_rewards(self) -> PackedFloats:
        return PackedFloats.concat(shard.turn_rewards for shard in self.shards)

    @property
    def pairs_apart(self) -> PackedFloats:
        """Pairs of tokens on different branches of each row; none if no row branches."""
        shards = self.shards if any(shard.pairs_apart for shard in self.shards) else ()
        return PackedFloats.concat(shard.pairs_apart or PackedFloats((0.0,) * shard.num_rows) for shard in shards)

    @property
    def prefixes(self) -> tuple[PackedInts, PackedInts] | None:
        """What each row begins with as others of its shard do, by number, and its tokens; None: nothing."""
        if not any(shard.prefixes for shard in self.shards):
            return None
        (shard,) = self.shards  # of the rows of supervised fine-tuning, which alone have any
        return shard.prefixes, shard.prefix_lengths

    @property
    def truncated(self) -> PackedInts:
        return PackedInts.concat(shard.truncated for shard in self.shards)


def check_failures(rewards: Sequence[float | None], failure: str | None, max_fraction: float, where: str) -> str | None:
    """Check that no more rewards failed than the config allows; return a warning of those that did, or None.

    Args:
        rewards: The rewards; None: it failed.
        failure: Message of the first failure.
        max_fraction: The largest fraction that may fail.
        where: Names the rows in the error, e.g. "step 3".

    Raises:
        RewardFailureError: More than `max_fraction` of them failed, or all.
    """
    if not (num_failed := rewards.count(None)):
        return None
    failed = f"{num_failed} of {len(rewards)} rewards of {where} failed"
    if num_failed > max_fraction * len(rewards) or num_failed == len(rewards):
        raise RewardFailureError(
            f"{failed}; reward.max_failure_fraction = {max_fraction} and at least one must succeed; the first failure: "
            f"{failure}"
        )
    return f"{failed}, and are left out; the first failure: {failure}"


class PutResult(Frozen):
    """One chunk that a worker stored, and the dtypes of its columns."""

    chunk: ChunkRef
    dtypes: dict[str, str]  # column name -> str(Arrow value type)
    traffic: StoreTraffic
    prompt_rows: EncodedInts | None = None  # of each row, the chunk's row with its prompt; None: every row has its own
