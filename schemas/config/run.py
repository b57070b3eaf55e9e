"""The configuration of a run, which is also the parameter schema of the `train` flow."""

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from schemas.base import FrozenConfig
from schemas.batch import SafeName
from schemas.config.advantage import AdvantageConfig, GrpoAdvantage
from schemas.config.checkpoint import CheckpointConfig
from schemas.config.correction import CorrectionConfig, NoCorrection
from schemas.config.data import DataConfig
from schemas.config.kl import KlConfig
from schemas.config.loss import ClippedLoss, LossConfig
from schemas.config.model import ModelConfig
from schemas.config.monitor import MonitorConfig
from schemas.config.optim import OptimConfig
from schemas.config.overlong import OverlongConfig
from schemas.config.packing import PackingConfig
from schemas.config.reward import RewardConfig
from schemas.config.rollout import EvalConfig, RolloutConfig, TransformersRollout
from schemas.config.runtime import RuntimeConfig
from schemas.config.store import StoreConfig, TieredStore


class RunConfig(FrozenConfig):
    """A GRPO run."""

    name: SafeName = "grpo"
    """Prefix of the run id, which is also the name of the run directory."""

    note: str = ""
    """Free text for people, e.g. why the run was started."""

    seed: NonNegativeInt = 0
    """Seed of data order, sampling and plans."""

    steps: PositiveInt
    """Number of GRPO steps; a run can be extended later."""

    model: ModelConfig
    """The model to train."""

    data: DataConfig
    """The training and held-out prompts."""

    reward: RewardConfig
    """The reward function; its `kind` must be given."""

    rollout: RolloutConfig = Field(default_factory=TransformersRollout)
    """The rollout engine and its sampling settings."""

    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Held-out evaluation."""

    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    """Penalty and mask for overlong responses; off by default."""

    advantage: AdvantageConfig = Field(default_factory=GrpoAdvantage)
    """The advantage estimator."""

    loss: LossConfig = Field(default_factory=ClippedLoss)
    """The policy loss."""

    kl: KlConfig = Field(default_factory=KlConfig)
    """The KL term; off by default."""

    correction: CorrectionConfig = Field(default_factory=NoCorrection)
    """Importance correction of the mismatch between engine and trainer; off by default."""

    packing: PackingConfig = Field(default_factory=PackingConfig)
    """Packing of rows into micro-batches."""

    optim: OptimConfig = Field(default_factory=OptimConfig)
    """The optimizer and its schedule."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints of the policy."""

    store: StoreConfig = Field(default_factory=TieredStore)
    """The column store."""

    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    """Services, processes, devices and retries."""

    monitors: tuple[MonitorConfig, ...] = ()
    """Trackers and files that get the metrics, in any number; none by default."""

    @model_validator(mode="after")
    def _overlong_fits(self) -> "RunConfig":
        buffer, limit = self.overlong.buffer_tokens, self.rollout.max_response_tokens
        if buffer > limit:
            raise ValueError(
                f"overlong.buffer_tokens = {buffer} is more than rollout.max_response_tokens = {limit}; lower it, as "
                "the penalty grows over the last tokens before that limit"
            )
        return self

    @model_validator(mode="after")
    def _stale_rows_are_corrected(self) -> "RunConfig":
        if self.runtime.max_staleness and isinstance(self.correction, NoCorrection):
            raise ValueError(
                "runtime.max_staleness = 1 trains on rows sampled by an older policy version, without a correction; "
                'set correction.kind = "truncated" (or "masked"), or runtime.max_staleness = 0'
            )
        return self

    def sampler_version(self, step: int) -> int:
        """Return the policy version that samples a step's rows, which update version `step`."""
        return max(0, step - self.runtime.max_staleness)

    def is_one_step_off_policy(self, step: int) -> bool:
        """Return whether the rollout of the next step overlaps the training of `step`."""
        return self.runtime.max_staleness > 0 and step + 1 < self.steps

    @property
    def needs_reference_worker(self) -> bool:
        """Whether the reference has its own workers; with LoRA it is the policy without its adapter."""
        return self.kl.coef > 0 and self.model.lora is None
