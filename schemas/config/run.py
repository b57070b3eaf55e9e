"""The whole configuration of one run; it is also the parameter schema of the `train` flow."""

from pydantic import Field, NonNegativeInt, PositiveInt

from schemas.base import Frozen
from schemas.batch import SafeName
from schemas.config.advantage import AdvantageConfig, GrpoAdvantage
from schemas.config.data import DataConfig
from schemas.config.loss import ClippedLoss, LossConfig
from schemas.config.model import ModelConfig
from schemas.config.optim import OptimConfig
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
    advantage: AdvantageConfig = Field(default_factory=GrpoAdvantage)
    loss: LossConfig = Field(default_factory=ClippedLoss)
    packing: PackingConfig = Field(default_factory=PackingConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    store: StoreConfig = Field(default_factory=TieredStore)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
