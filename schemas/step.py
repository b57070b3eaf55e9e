"""What the stages of a step hand to each other, and what a step and a run report."""

from pydantic import Field, NonNegativeInt, PositiveInt

from schemas.base import Frozen
from schemas.batch import BatchHandle, SafeName
from schemas.config.run import RunConfig
from schemas.metrics import Metrics
from schemas.plan import StepPlan
from schemas.rollout import PutResult
from schemas.store import StoreTraffic, StoreUsage
from schemas.weights import WeightsTransfer


class RunHandle(Frozen):
    """One run: its identity, its directory and its configuration."""

    run_id: SafeName
    directory: str
    config: RunConfig
    store_incarnation: str  # the column store's incarnation; stages that live in it are keyed by it


class PolicyHandle(Frozen):
    """The policy at one version. Version k has seen k steps, so it is also the number of the next step."""

    run_id: SafeName
    version: NonNegativeInt
    incarnation: str  # the gathering of worker processes that holds it; an update is recorded per incarnation

    @property
    def step(self) -> int:
        """The step that this version samples for and is updated by."""
        return self.version


class ProcessGroupHandle(Frozen):
    """One gathering of a sharded worker's ranks; a lost rank ends it."""

    group_id: str
    host: str
    port: int
    num_ranks: PositiveInt


class StoredBatch(Frozen):
    """A stage's batch, and what the stage moved to make it."""

    batch: BatchHandle
    traffic: StoreTraffic
    row_kl: tuple[float, ...] | None = None  # per row, where the KL term is part of the reward


class AdvantageHandle(Frozen):
    """The batch that is trained on, with its advantages column, and the plan of its updates."""

    batch: BatchHandle
    plan: StepPlan
    metrics: Metrics
    traffic: StoreTraffic


class ScoreResult(Frozen):
    """What one rank stored of a scoring pass; n rows, ascending."""

    put: PutResult | None  # None: the rank had no rows
    row_kl: tuple[float, ...] = ()  # n, where the KL term is part of the reward


class UpdateReport(Frozen):
    """What the update of one step did. A worker that already did it answers with the same report."""

    policy: PolicyHandle  # after the update
    metrics: Metrics
    traffic: StoreTraffic


class StepReport(Frozen):
    """One finished step: what it measured, in plain numbers."""

    step: NonNegativeInt
    policy_version: NonNegativeInt  # after the step
    metrics: dict[str, float]
    seconds: float
    seconds_by_phase: dict[str, float]
    store: StoreUsage | None = None  # at the end of the step, before its columns are cleared
    traffic_by_stage: dict[str, StoreTraffic] = Field(default_factory=dict)
    plan: str | None = None  # the digest of the step's plan
    publish: WeightsTransfer | None = None  # of the weights to the rollout workers; None: they held them already


class SourceReport(Frozen):
    """Held-out figures of one data source; see `rl_core.rollout.evaluation` for the formulas.

    Those of rewards are None where every reward of the source failed.
    """

    data_source: str
    num_prompts: PositiveInt
    mean_at_n: float | None  # share of correct samples
    best_at_n: float | None  # share of prompts with a correct sample
    maj_at_n: float | None  # share of prompts whose majority answer is correct
    reward: float | None  # mean
    num_failed: NonNegativeInt  # rewards
    response_tokens: float  # mean per sample
    truncated: float  # share of samples that reached the most tokens


class EvalReport(Frozen):
    """Held-out accuracy of one policy version."""

    policy_version: NonNegativeInt
    num_prompts: NonNegativeInt
    samples_per_prompt: PositiveInt = 1  # n; reports of earlier versions have neither this nor sources
    accuracy: float  # mean@n of "the reward is at least the configured threshold", over all prompts
    reward: float  # mean; failed rewards are left out
    num_failed: NonNegativeInt  # rewards
    seconds: float
    sources: tuple[SourceReport, ...] = ()  # in the order of the file


class RunSummary(Frozen):
    """One finished run, as `summary.json` holds it."""

    run_id: SafeName
    steps: NonNegativeInt
    reward_first: float  # mean reward of the first 10 steps
    reward_last: float  # mean reward of the last 10 steps
    accuracy_before: float | None
    accuracy_after: float | None
    seconds: float
    tokens_per_second: float  # prompt and response tokens of all steps over the steps' seconds
    seconds_by_phase: dict[str, float]
    store_bytes_at_end: NonNegativeInt
    prefect_ui: str
