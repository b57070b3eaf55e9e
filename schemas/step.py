"""The handles that the stages of a step pass on, and the reports of a step, its saved queries and a run."""

from collections.abc import Sequence
from math import inf, isnan
from statistics import fmean
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from schemas.base import Frozen
from schemas.batch import BatchHandle, ColumnGroup, EncodedInts, SafeName, StoreTraffic, StoreUsage
from schemas.config.run import RunConfig
from schemas.metrics import Metrics
from schemas.placement import Device, GpuPhase, PhaseMemory
from schemas.plan import StepPlan
from schemas.rollout import FinishReason, PutResult, SourceResults
from schemas.summary import LengthHistogram
from schemas.weights import WeightsTransfer


class RunHandle(Frozen):
    """One run: its identity, its directory and its configuration."""

    run_id: SafeName
    identity: SafeName  # of this directory's run: what its processes are named by
    directory: str
    config: RunConfig
    store_incarnation: str  # of the column store; the key of every stage whose result is in the store
    source: str | None = None  # the directory of the run whose stored columns a replay reads besides its own


class PolicyHandle(Frozen):
    """The policy at one version. Version k has been updated by k steps, so k is also the number of the next step."""

    run_id: SafeName
    version: NonNegativeInt
    incarnation: str  # of the worker group that holds it; an update is recorded per incarnation

    @property
    def step(self) -> int:
        """The step that updates this version."""
        return self.version


class ProcessGroupHandle(Frozen):
    """The process group of a sharded worker's ranks; losing a rank ends it."""

    group_id: str
    host: str
    port: int
    num_ranks: PositiveInt


class StoredBatch(Frozen):
    """The batch that a stage produced, and the store traffic that it caused."""

    batch: BatchHandle
    traffic: StoreTraffic


class ScoredColumn(Frozen):
    """The column that a scoring stage added to a batch, and the store traffic that it caused."""

    group: ColumnGroup
    traffic: StoreTraffic
    row_kl: tuple[float, ...] | None = None  # one per row, if the KL term is part of the reward
    telemetry: Metrics = Field(default_factory=dict)  # of all ranks


class AdvantageHandle(Frozen):
    """The batch to train on, with its advantages column, and the plan of its updates."""

    batch: BatchHandle
    plan: StepPlan
    metrics: Metrics
    traffic: StoreTraffic


class ScoreResult(Frozen):
    """The result of one rank's part of a scoring pass: n rows, ascending."""

    put: PutResult | None  # None: the rank had no rows
    row_kl: tuple[float, ...] = ()  # n, if the KL term is part of the reward
    telemetry: Metrics = Field(default_factory=dict)  # of this rank


class TeacherRows(Frozen):
    """The rows of a batch that a teacher scores: n, ascending."""

    rows: EncodedInts  # n numbers
    prompt_lengths: EncodedInts | None = None  # n, tokens; None: it reads the batch's own prompts
    prompts: EncodedInts | None = None  # n numbers, equal for rows of which it reads the same prompt; None: as above
    shares_prompts: bool = False  # whether it computes a prompt once for its rows in a micro-batch


class UpdateReport(Frozen):
    """The result of one step's update. A worker that has already applied the update returns the same report again."""

    policy: PolicyHandle  # after the update
    metrics: Metrics
    traffic: StoreTraffic
    telemetry: Metrics = Field(default_factory=dict)  # of all ranks; reports of earlier versions of Sluice lack it


class Span(Frozen):
    """A part of a step's work: when it began and how long it took."""

    name: str
    start: NonNegativeFloat  # seconds after the step's start
    seconds: NonNegativeFloat


class StepReport(Frozen):
    """One finished step and its metrics as plain numbers."""

    step: NonNegativeInt
    policy_version: NonNegativeInt  # after the step
    metrics: dict[str, float]
    seconds: float
    seconds_by_phase: dict[str, float]
    store: StoreUsage | None = None  # at the end of the step, before its columns are cleared
    traffic_by_stage: dict[str, StoreTraffic] = Field(default_factory=dict)
    plan: str | None = None  # the digest of the step's plan
    config: str | None = None  # the digest of the settings that its rows, log-probs and plan depend on
    publish: WeightsTransfer | None = None  # to the rollout workers; None: they already held the weights
    memory_by_phase: dict[GpuPhase, PhaseMemory] = Field(default_factory=dict)  # if workers take turns on GPUs
    started_at: float | None = None  # Unix time; reports of earlier versions of Sluice lack it, and what follows
    timeline: tuple[Span, ...] = ()  # the phases, and work of the next step that overlaps them
    response_lengths: LengthHistogram | None = None  # in tokens, in buckets that are the same in every step
    telemetry: dict[str, float] = Field(default_factory=dict)  # measurements, which differ from run to run
    sources: SourceResults | None = None  # if there is a curriculum: schedules of later steps depend on it

    @property
    def tokens_per_second(self) -> float:
        """Prompt and response tokens over the step's time."""
        return self.metrics["tokens"] / self.seconds


class SourceReport(Frozen):
    """Held-out metrics of one data source; `rl_core.rollout.evaluation` has the formulas.

    Metrics that depend on rewards are None if every reward of the source failed.
    """

    data_source: str
    num_prompts: PositiveInt
    mean_at_n: float | None  # fraction of correct samples
    best_at_n: float | None  # fraction of prompts with a correct sample
    maj_at_n: float | None  # fraction of prompts whose majority answer is correct
    reward: float | None  # mean
    num_failed: NonNegativeInt  # rewards
    response_tokens: float  # mean per sample, of those that the model sampled
    truncated: float  # fraction of samples that reached the token limit


class EvalShard(Frozen):
    """The samples of one batch of held-out prompts, which one worker generated and scored.

    P prompts of n samples each, N = P * n, prompt by prompt.
    """

    data_sources: tuple[str, ...]  # P
    rewards: tuple[float | None, ...]  # N; None: the reward function failed
    answers: tuple[NonNegativeInt, ...]  # N, of n per prompt: the number of the first sample with the same answer
    response_lengths: tuple[int, ...]  # N, tokens that the model sampled
    finish_reasons: tuple[FinishReason, ...]  # N
    failure: str | None = None  # message of the first reward failure


class EvalReport(Frozen):
    """Held-out accuracy of one policy version; in supervised fine-tuning, that of tokens, and their loss."""

    policy_version: NonNegativeInt
    num_prompts: NonNegativeInt
    samples_per_prompt: PositiveInt = 1  # n; reports of earlier versions of Sluice lack it, and `sources`
    accuracy: float  # mean@n over all prompts; correct: the reward reaches the configured threshold
    reward: float | None  # mean, without failed rewards; None: supervised fine-tuning
    num_failed: NonNegativeInt  # rewards
    seconds: float
    loss: float | None = None  # nats per token with loss, of supervised fine-tuning
    sources: tuple[SourceReport, ...] = ()  # in order of appearance in the file
    measured: str = ""  # the digest of the held-out rows and settings; earlier versions of Sluice didn't record it

    @property
    def score(self) -> float:
        """What the best version has most of: accuracy, or in supervised fine-tuning the negative loss; NaN is worst."""
        if self.loss is None:
            return self.accuracy
        return -inf if isnan(self.loss) else -self.loss

    def __str__(self) -> str:
        """Return its figures as text."""
        loss = "" if self.loss is None else f"loss {self.loss:.4f} nats per token, "
        return f"{loss}accuracy {self.accuracy:.3f}"


def comparable(evals: Sequence[EvalReport], measured: str | None = None) -> list[EvalReport]:
    """Return the evaluations by the same rows and settings, as far as they say so; None: as the newest one."""
    measured = evals[-1].measured if measured is None and evals else measured
    return [report for report in evals if report.measured in ("", measured)]


class RunEvent(Frozen):
    """The start of a run, or its continuation: by a new driver, or by the same one after workers were lost.

    A run that was forked from another one starts with a `fork`.
    """

    kind: Literal["start", "fork", "resume", "restart"]
    step: NonNegativeInt  # the step with which it continues
    time: float  # Unix time
    reason: str = ""  # of a restart; of a fork, its parent
    versions: dict[str, str] = Field(default_factory=dict)  # of Sluice and its main dependencies, by distribution
    device: Device | None = None  # of the workers, of a fork the parent's; None: an earlier version of Sluice


def mean_of(reports: Sequence[StepReport], metric: str) -> float | None:
    """Return the mean of a metric over the steps that have it; None if none does."""
    values = [report.metrics[metric] for report in reports if metric in report.metrics]
    return fmean(values) if values else None


def averaged_steps(num_steps: int) -> int:
    """Return over how many first and last steps a run's summary averages the reward: of a short run, over its halves.

    Example:
        >>> [averaged_steps(num_steps) for num_steps in (1, 8, 30)]
        [1, 4, 10]
    """
    return max(min(num_steps // 2, 10), 1)


class RunSummary(Frozen):
    """One finished run, the content of `summary.json`."""

    run_id: SafeName
    steps: NonNegativeInt
    reward_first: float | None  # mean of the first `averaged_steps(steps)` steps; None: supervised fine-tuning
    reward_last: float | None  # mean of as many last ones
    loss_first: float | None = None  # the same of the cross-entropy of supervised fine-tuning, in nats per token
    loss_last: float | None = None
    held_out_loss_before: float | None = None
    held_out_loss_after: float | None = None
    accuracy_before: float | None
    accuracy_after: float | None
    seconds: float
    tokens_per_second: float  # prompt + response tokens of all steps / seconds of all steps
    seconds_by_phase: dict[str, float]
    store_bytes_at_end: NonNegativeInt
    prefect_ui: str


class FailedQuery(Frozen):
    """A saved query that returned rows for a step, or could not be answered."""

    name: str  # of its file, without `.sql`
    num_rows: NonNegativeInt = 0
    rows: tuple[str, ...] = ()  # the first ones, as JSON
    error: str | None = None

    def __str__(self) -> str:
        what = self.error or f"{self.num_rows:,} row{'s' if self.num_rows > 1 else ''}, such as {self.rows[0]}"
        return f"query {self.name}: {what}"
