"""The configuration of a run, which is also the parameter schema of the `train` flow."""

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from schemas.base import FrozenConfig
from schemas.batch import SafeName
from schemas.config.advantage import AdvantageConfig, GrpoAdvantage, OverlongConfig
from schemas.config.data import DataConfig
from schemas.config.distillation import DistillationConfig
from schemas.config.environment import EnvironmentConfig
from schemas.config.loss import (
    ClippedLoss,
    CorrectionConfig,
    CovarianceLoss,
    KlConfig,
    KlCovLoss,
    LossConfig,
    NoCorrection,
)
from schemas.config.model import ModelConfig
from schemas.config.monitor import MonitorConfig
from schemas.config.optim import OptimConfig, PackingConfig
from schemas.config.renamed import require_current_keys
from schemas.config.reward import RewardConfig
from schemas.config.rollout import EvalConfig, RolloutConfig, TransformersRollout
from schemas.config.runtime import ApprovalConfig, RuntimeConfig, ServicesConfig, TimeoutsConfig, WeightsConfig
from schemas.config.sft import SftConfig, check_sft, with_sft_defaults
from schemas.config.store import CheckpointConfig, StoreConfig, TieredStore


class RunConfig(FrozenConfig):
    """A GRPO run; with a section `sft`, one of supervised fine-tuning."""

    name: SafeName = "grpo"
    """Prefix of the run id, which is also the name of the run directory."""

    note: str = ""
    """Free text for people, e.g. why the run was started."""

    seed: NonNegativeInt = 0
    """Seed of data order, sampling and plans."""

    steps: PositiveInt
    """Number of steps; a run can be extended later."""

    model: ModelConfig
    """The model to train."""

    data: DataConfig
    """The training and held-out prompts, or rows."""

    sft: SftConfig | None = None
    """Supervised fine-tuning on the rows of `data`; None: GRPO."""

    reward: RewardConfig
    """The reward function; its `kind` must be given, unless there is a section `sft`."""

    environment: EnvironmentConfig | None = None
    """What answers the model's turns, unless a source has its own; None: a response is one turn."""

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

    distillation: DistillationConfig | None = None
    """Teachers whose log-probs are the training signal, alone or with the reward; None: the reward alone."""

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
    """Where the run is, its processes and devices, and its retries."""

    services: ServicesConfig = Field(default_factory=ServicesConfig)
    """Ray and Prefect, and the encryption of the column store's connections."""

    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig)
    """How long the parts of a run wait for each other."""

    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    """How new weights reach the rollout workers."""

    approval: ApprovalConfig = Field(default_factory=ApprovalConfig)
    """What is checked after each step, and when the run pauses for somebody's decision."""

    monitors: tuple[MonitorConfig, ...] = ()
    """Trackers and files that get the metrics, in any number; none by default."""

    @model_validator(mode="before")
    @classmethod
    def _has_current_keys(cls, given: Any) -> Any:
        return with_sft_defaults(require_current_keys(given))

    @model_validator(mode="after")
    def _sft_has_its_keys(self) -> "RunConfig":
        check_sft(self)
        return self

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
    def _sampling_mask_fits(self) -> "RunConfig":
        rollout = self.rollout
        problems = {
            "nothing is truncated: set rollout.top_p, rollout.top_k or rollout.min_p": (
                rollout.top_p == 1 and not rollout.top_k and not rollout.min_p
            ),
            "teachers score over all tokens: remove distillation": self.distillation,
        }
        if rollout.sampling_mask and (found := next((each for each, holds in problems.items() if holds), None)):
            raise ValueError(f"rollout.sampling_mask = true, but {found}, or set it to false")
        return self

    @model_validator(mode="after")
    def _muon_has_matrices(self) -> "RunConfig":
        if self.optim.kind == "muon" and self.model.lora is not None:
            raise ValueError(
                'optim.kind = "muon" orthogonalizes updates of whole matrices, which adapters (model.lora) are not; '
                'set optim.kind = "adamw", or leave model.lora out'
            )
        return self

    @model_validator(mode="after")
    def _kl_cov_has_an_effect(self) -> "RunConfig":
        if isinstance(self.loss, KlCovLoss) and self.optim.updates_per_step == 1:
            raise ValueError(
                'loss.kind = "kl_cov" penalizes what updates of a step change, which is nothing before its only one; '
                'set optim.updates_per_step to 2 or more, or loss.kind = "clip_cov"'
            )
        return self

    @model_validator(mode="after")
    def _queries_have_columns(self) -> "RunConfig":
        if self.approval.queries is not None and not self.store.is_durable:
            raise ValueError(
                f'approval.queries reads columns from files, and store.kind = "{self.store.kind}" keeps none; set '
                'store.kind = "tiered", or leave approval.queries out'
            )
        if self.approval.on_failed_queries and self.approval.queries is None:
            raise ValueError("approval.on_failed_queries needs approval.queries; set both, or neither")
        return self

    @model_validator(mode="after")
    def _stale_rows_are_corrected(self) -> "RunConfig":
        if self.runtime.max_staleness and isinstance(self.correction, NoCorrection):
            raise ValueError(
                f"runtime.max_staleness = {self.runtime.max_staleness} trains on rows sampled by an older policy "
                'version, without a correction; set correction.kind = "truncated" (or "masked"), or '
                "runtime.max_staleness = 0"
            )
        return self

    @model_validator(mode="after")
    def _reused_rows_are_corrected(self) -> "RunConfig":
        if self.data.reuse is not None and isinstance(self.correction, NoCorrection):
            raise ValueError(
                "data.reuse trains on rows sampled by other weights, without a correction; set correction.kind = "
                '"truncated" (or "masked"), or leave data.reuse out'
            )
        return self

    @model_validator(mode="after")
    def _reused_steps_are_kept(self) -> "RunConfig":
        if self.data.reuse is None or self.data.reuse.max_age is None:
            return self
        max_age, needed, store = self.data.reuse.max_age, self.steps_kept_for_reuse, self.store
        if max_age <= min(1, self.runtime.max_staleness):
            raise ValueError(
                f"data.reuse.max_age = {max_age} leaves no step to take groups from, as with runtime.max_staleness = "
                f"{self.runtime.max_staleness} the step before is not finished in time; set it to 2 or more"
            )
        if not store.is_durable:
            raise ValueError(
                f'data.reuse takes groups from stored steps, and store.kind = "{store.kind}" keeps none; set '
                'store.kind = "tiered"'
            )
        if store.keep_steps != "all" and store.keep_steps < needed:
            raise ValueError(
                f"data.reuse.max_age = {max_age} needs store.keep_steps of at least {needed}, not {store.keep_steps}: "
                f"max_age, and (checkpoint.keep_last - 1) x checkpoint.every_steps = {needed - max_age} for a resume "
                "from the oldest checkpoint"
            )
        if store.keep_bytes is not None:
            raise ValueError(
                "store.keep_bytes may remove steps that data.reuse takes groups from; leave it out, and set "
                "store.keep_steps"
            )
        return self

    @model_validator(mode="after")
    def _parts_can_be_kept(self) -> "RunConfig":
        n, limit = self.runtime.max_staleness, self.rollout.max_response_tokens
        problems = {
            'store.kind is not durable; set store.kind = "tiered"': not self.store.is_durable,
            "store.keep_steps = 0; set it to 1 or more": self.store.keep_steps == 0,
            "rollout.dynamic_sampling replaces groups of a whole step; remove it": self.rollout.dynamic_sampling,
            "environment plays whole trajectories; remove it": self.environments,
            "rollout.stop may be cut between two parts; use rollout.stop_token_ids": self.rollout.stop,
            "rollout.router_replay needs whole responses; set it to false": self.rollout.router_replay,
            "rollout.sampling_mask needs whole responses; set it to false": self.rollout.sampling_mask,
            f"rollout.max_response_tokens = {limit} can't be split into {n} parts; raise it": limit < n,
        }
        if n > 1 and (found := next((problem for problem, holds in problems.items() if holds), None)):
            raise ValueError(
                f"runtime.max_staleness = {n} samples responses in {n} parts, over several steps, but {found}, or set "
                "runtime.max_staleness = 1"
            )
        return self

    @model_validator(mode="after")
    def _distillation_fits(self) -> "RunConfig":
        if self.distillation is None:
            return self
        if self.rollout.dynamic_sampling and not self.distillation.reward_weight:
            raise ValueError(
                "rollout.dynamic_sampling drops groups by their rewards, which distillation.reward_weight = 0 doesn't "
                "train on; remove it, or raise that weight"
            )
        if (
            isinstance(self.loss, CovarianceLoss)
            and self.distillation.reads_top
            and not self.distillation.reward_weight
        ):
            raise ValueError(
                f'loss.kind = "{self.loss.kind}" selects tokens by their advantages, which are all 0 with '
                f'distillation.divergence = "{self.distillation.divergence}" and distillation.reward_weight = 0; raise '
                "that weight, or choose another loss.kind"
            )
        if self.distillation.has_prompts and self.data.reuse is not None and self.data.reuse.run is not None:
            raise ValueError(
                "data.reuse.run takes rows of another run, which lack what the prompt of a teacher makes of them; "
                "leave data.reuse.run out, or the prompt of each of distillation.teachers"
            )
        return self

    @model_validator(mode="after")
    def _environment_fits(self) -> "RunConfig":
        if self.reward.reads_environment and not self.environments:
            raise ValueError(
                'reward.kind = "environment" takes an environment\'s rewards, but there is none; set environment.kind '
                "and its settings, or another reward.kind"
            )
        if self.reward.kind == "environment" and None in self.environment_by_source:
            without = self.data.train_sources[self.environment_by_source.index(None)].path
            raise ValueError(
                f'reward.kind = "environment" takes the rewards of environments, but {without} has none; give that one '
                "of data.sources an environment, or set another reward.kind"
            )
        if self.advantage.kind == "turn_level" and not self.reward.environment_weight:
            raise ValueError(
                'advantage.kind = "turn_level" gives each turn the rewards from it on, but the reward has none of '
                'turns; set reward.kind = "environment", or a weighted sum with it, or another advantage.kind'
            )
        if self.loss.observation_coef and not self.environments:
            raise ValueError(
                f"loss.observation_coef = {self.loss.observation_coef:g} trains on what an environment answers, but "
                "there is none; set environment.kind and its settings, or loss.observation_coef = 0"
            )
        if self.environments and self.rollout.router_replay:
            raise ValueError(
                "rollout.router_replay = true records the experts of one turn's tokens, not those of an environment's; "
                "set it to false, or remove environment"
            )
        return self

    @model_validator(mode="after")
    def _reward_has_parts(self) -> "RunConfig":
        if self.advantage.kind != "gdpo":
            return self
        if self.reward.kind != "weighted":
            raise ValueError(
                f'advantage.kind = "gdpo" normalizes each part of a weighted reward, but reward.kind is '
                f'"{self.reward.kind}"; set reward.kind = "weighted" and its parts, or another advantage.kind'
            )
        if self.kl.coef and self.kl.in_reward:
            raise ValueError(
                'advantage.kind = "gdpo" would normalize the KL in the reward like a part, whatever kl.coef is; set '
                "kl.in_reward = false, or another advantage.kind"
            )
        return self

    @model_validator(mode="after")
    def _rows_of_all_environments_resume_alike(self) -> "RunConfig":
        if len({(each.resume_rows, each.lockstep_steps) for each in self.environments}) > 1:
            raise ValueError(
                "the environments of data.sources differ in resume_rows or lockstep_steps, but their rows are sampled "
                "together; set these to the same values"
            )
        return self

    @model_validator(mode="after")
    def _engines_have_whole_gpus(self) -> "RunConfig":
        if self.rollout.gpus_per_worker > 1 and self.runtime.placement == "colocated":
            raise ValueError(
                f"rollout.tensor_parallel = {self.rollout.gpus_per_worker} gives an engine GPUs of its own, but with "
                'runtime.placement = "colocated" it would share one; set runtime.placement = "separate", or '
                "rollout.tensor_parallel = 1"
            )
        return self

    @model_validator(mode="after")
    def _profiled_steps_exist(self) -> "RunConfig":
        if outside := [step for step in self.runtime.profile_steps if step >= self.steps]:
            raise ValueError(
                f"runtime.profile_steps = {list(self.runtime.profile_steps)} names {outside}, but with steps = "
                f"{self.steps} the run has steps 0 to {self.steps - 1}; choose among these, or leave it empty"
            )
        return self

    def sampler_version(self, step: int) -> int:
        """Return the newest policy version that samples a step's rows, which update version `step`."""
        return max(0, step - min(1, self.runtime.max_staleness))

    def sampled_steps(self, step: int) -> range:
        """Return the steps of which rows are sampled when those of `step` are finished: it, and steps that follow."""
        return range(step, max(step + 1, min(step + self.runtime.max_staleness, self.steps)))

    def token_limit(self, steps_ahead: int) -> int:
        """Return the most tokens that a response has so many steps before the rows of its own step are finished."""
        parts = max(1, self.runtime.max_staleness)
        return -(-self.rollout.max_response_tokens * (parts - steps_ahead) // parts)

    @property
    def max_row_tokens(self) -> int:
        """The most tokens that prompt and response of a trained row may have together."""
        return self.sft.max_tokens if self.sft else self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def steps_kept_for_reuse(self) -> int:
        """How many steps before a checkpoint must stay stored, so that a resume from any kept one can reuse them."""
        if self.data.reuse is None or self.data.reuse.max_age is None:
            return 0
        return self.data.reuse.max_age + (self.checkpoint.keep_last - 1) * self.checkpoint.every_steps

    @property
    def first_reused_group(self) -> int:
        """The number within a step from which its groups are reused ones; those that it samples have smaller ones."""
        dynamic = self.rollout.dynamic_sampling
        return self.rollout.num_prompts * (dynamic.max_rounds if dynamic else 1)

    def overlaps_next_rollout(self, step: int) -> bool:
        """Return whether the rollout of the next step overlaps the training of `step`."""
        return self.runtime.max_staleness > 0 and step + 1 < self.steps

    @property
    def environment_by_source(self) -> tuple[EnvironmentConfig | None, ...]:
        """The environment of each source of training prompts; None: its responses are one turn."""
        return tuple(source.environment or self.environment for source in self.data.train_sources)

    @property
    def environments(self) -> tuple[EnvironmentConfig, ...]:
        """The different environments of all sources, in their order."""
        different: list[EnvironmentConfig] = []
        for environment in self.environment_by_source:
            if environment is not None and environment not in different:
                different.append(environment)
        return tuple(different)

    @property
    def keeps_journal(self) -> bool:
        """Whether rollout workers record what environments answer; it is for runs whose columns are durable, too."""
        environments = self.environments
        return self.store.is_durable and bool(environments) and all(each.journal for each in environments)

    @property
    def scores_behavior(self) -> bool:
        """Whether behavior log-probs need a pass of their own, before the update.

        If the step's only update computes them anyway, and nothing reads them before, they don't.
        """
        if self.sft is not None:
            return False
        selects = isinstance(self.loss, CovarianceLoss)
        return selects or self.loss.behavior == "recompute" or self.optim.updates_per_step > 1 or self.kl.in_reward

    @property
    def time_shares_gpus(self) -> bool:
        """Whether workers that share a GPU move out of its memory while others compute.

        Off-policy, engine and policy compute at the same time, so that both stay in it.
        """
        return self.runtime.placement == "colocated" and not self.runtime.max_staleness

    @property
    def needs_reference_worker(self) -> bool:
        """Whether the reference has its own workers; with LoRA it is the policy without its adapter."""
        return self.kl.coef > 0 and self.model.lora is None
