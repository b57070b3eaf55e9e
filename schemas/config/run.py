"""The whole configuration of one run; it is also the parameter schema of the `train` flow."""

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from schemas.base import Frozen
from schemas.batch import SafeName
from schemas.config.advantage import AdvantageConfig, GrpoAdvantage
from schemas.config.checkpoint import CheckpointConfig
from schemas.config.correction import CorrectionConfig, NoCorrection
from schemas.config.data import DataConfig
from schemas.config.kl import KlConfig
from schemas.config.loss import ClippedLoss, LossConfig
from schemas.config.model import ModelConfig
from schemas.config.optim import OptimConfig
from schemas.config.overlong import OverlongConfig
from schemas.config.packing import PackingConfig
from schemas.config.reward import RewardConfig
from schemas.config.rollout import EvalConfig, RolloutConfig, TransformersRollout
from schemas.config.runtime import RuntimeConfig
from schemas.config.store import StoreConfig, TieredStore


class RunConfig(Frozen):
    """A GRPO run."""

    name: SafeName = "grpo"
    seed: NonNegativeInt = 0
    steps: PositiveInt
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    rollout: RolloutConfig = Field(default_factory=TransformersRollout)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    advantage: AdvantageConfig = Field(default_factory=GrpoAdvantage)
    loss: LossConfig = Field(default_factory=ClippedLoss)
    kl: KlConfig = Field(default_factory=KlConfig)
    correction: CorrectionConfig = Field(default_factory=NoCorrection)
    packing: PackingConfig = Field(default_factory=PackingConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    store: StoreConfig = Field(default_factory=TieredStore)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)

    @model_validator(mode="after")
    def _overlong_fits(self) -> "RunConfig":
        buffer, limit = self.overlong.buffer_tokens, self.rollout.max_response_tokens
        if buffer > limit:
            raise ValueError(
                f"overlong.buffer_tokens = {buffer} is more than rollout.max_response_tokens = {limit}; lower it: the "
                "penalty grows over the last tokens of that limit"
            )
        return self

    @model_validator(mode="after")
    def _stale_rows_are_corrected(self) -> "RunConfig":
        if self.runtime.max_staleness and isinstance(self.correction, NoCorrection):
            raise ValueError(
                "runtime.max_staleness = 1 trains on rows that an older version sampled, and nothing corrects for it; "
                'set correction.kind = "truncated" (or "masked"), or runtime.max_staleness = 0'
            )
        return self

    def sampler_version(self, step: int) -> int:
        """The policy version that samples a step's rows; the one that they update is `step`."""
        return max(0, step - self.runtime.max_staleness)

    def is_one_step_off_policy(self, step: int) -> bool:
        """Whether the next step's rows are sampled while a step is trained."""
        return self.runtime.max_staleness > 0 and step + 1 < self.steps

    @property
    def needs_reference_worker(self) -> bool:
        """Whether the reference has workers of its own: with LoRA it is the policy without its adapter."""
        return self.kl.coef > 0 and self.model.lora is None
