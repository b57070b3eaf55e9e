"""The memory and storage that one step of a config takes, computed before anything is started."""

import math
from collections.abc import Mapping, Sequence

import pyarrow as pa
from pydantic import NonNegativeInt, PositiveInt
from transformers import PreTrainedModel

from flows.cli.simulate import ColumnBytes, LengthShape, column_bytes, column_dtypes, simulate_step
from infra.models.load import build_meta_model, num_embeddings
from infra.models.lora import add_adapter
from rl_core.columns.codec import arrow_type, encoded_bytes
from rl_core.planning import plan_forward, plan_step
from schemas.base import Frozen
from schemas.catalog import column_spec
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.plan import ForwardPlan, StepPlan

FLOAT_BYTES = 4  # weights, gradients and both of Adam's moments are float32
ADAM_MOMENTS = 2


class RankBytes(Frozen):
    """The bytes that one rank holds at all times; activations and gathered layers are not included."""

    weights: NonNegativeInt
    gradients: NonNegativeInt
    optimizer: NonNegativeInt
    previous: NonNegativeInt  # weights of the previous version, kept if the run is one-step off-policy; else 0
    reference: NonNegativeInt  # weights on a rank of the reference's own workers; 0 without them


class Footprint(Frozen):
    """The memory and storage that one step takes."""

    num_rows: PositiveInt
    prompt_tokens: PositiveInt
    response_tokens: PositiveInt
    longest_prompt: PositiveInt  # tokens
    longest_response: PositiveInt  # tokens
    padded_tokens: PositiveInt  # of the same rows, padded to the longest prompt and the longest response
    columns: tuple[ColumnBytes, ...]  # without reward parts, whose names only the reward function defines
    chunk_bytes: NonNegativeInt  # overhead of the Arrow files
    store_bytes: PositiveInt  # the peak, when all columns of the step are stored
    most_store_bytes: PositiveInt  # the same with every response at its longest
    capacity_bytes: PositiveInt
    rank_bytes: RankBytes
    plan: StepPlan
    forward: ForwardPlan  # of a scoring pass
    warnings: tuple[str, ...]

    @property
    def pad_waste(self) -> float:
        """The fraction of a padded batch that is padding."""
        return 1 - (self.prompt_tokens + self.response_tokens) / self.padded_tokens

    def check_capacity(self) -> None:
        """Check that the store can hold the step.

        Raises:
            ConfigError: It can't.
        """
        if self.store_bytes > self.capacity_bytes:
            raise ConfigError(
                f"the columns of one step take {self.store_bytes} bytes, more than store.capacity_bytes = "
                f"{self.capacity_bytes}; raise it, or lower rollout.num_prompts, rollout.samples_per_prompt or "
                "rollout.max_response_tokens"
            )


def measure_step(config: RunConfig, shape: LengthShape = "lognormal", fill: float = 0.5) -> Footprint:
    """Simulate a step and return its footprint. Every response token counts as trained.

    Args:
        config: The run, checked by `flows.preflight.check`.
        shape: The distribution of the response lengths, see `simulate.draw_lengths`.
        fill: The mean response length, as a fraction of `rollout.max_response_tokens`; above 0, at most 1.

    Raises:
        UserError: The model or the data is not usable.
        PlanError: A row is over the token budget.
    """
    step = simulate_step(config, shape, fill)
    prompts, responses = step.prompt_lengths, step.response_lengths
    packing = {"num_ranks": config.runtime.num_policy_ranks, "token_budget": config.packing.token_budget}
    plan = plan_step(
        prompts, responses, responses, num_updates=config.optim.updates_per_step, seed=config.seed, **packing
    )
    dtypes = column_dtypes(config, num_embeddings(config.model))
    columns, chunk_bytes = column_bytes(step, dtypes), _chunk_bytes(config, dtypes)
    store_bytes = _total(columns) + chunk_bytes
    most_store_bytes = _total(column_bytes(step.at_longest(), dtypes)) + chunk_bytes
    return Footprint(
        num_rows=len(prompts),
        prompt_tokens=int(prompts.sum()),
        response_tokens=int(responses.sum()),
        longest_prompt=int(prompts.max()),
        longest_response=int(responses.max()),
        padded_tokens=len(prompts) * int(prompts.max() + responses.max()),
        columns=columns,
        chunk_bytes=chunk_bytes,
        store_bytes=store_bytes,
        most_store_bytes=most_store_bytes,
        capacity_bytes=config.store.capacity_bytes,
        rank_bytes=rank_bytes(config),
        plan=plan,
        forward=plan_forward(prompts, responses, **packing),
        warnings=_warnings(config, plan, most_store_bytes),
    )


def rank_bytes(config: RunConfig) -> RankBytes:
    """Return the bytes on the fullest rank. Each parameter is sharded evenly along its first dimension.

    Raises:
        UserError: The model's config is not that of a causal language model, or its adapter can't be made.
    """
    model = build_meta_model(config.model)
    reference = _shard_bytes(model, config.runtime.num_reference_ranks) if config.needs_reference_worker else 0
    if config.model.lora is not None:
        add_adapter(model, config.model.lora)
    ranks = config.runtime.num_policy_ranks
    trained = _shard_bytes(model, ranks, trained_only=True)
    return RankBytes(
        weights=_shard_bytes(model, ranks),
        gradients=trained,
        optimizer=ADAM_MOMENTS * trained,
        previous=trained if config.runtime.max_staleness else 0,
        reference=reference,
    )


def _shard_bytes(model: PreTrainedModel, num_ranks: int, *, trained_only: bool = False) -> int:
    shapes = [list(part.shape) for part in model.parameters() if part.requires_grad or not trained_only]
    return sum(FLOAT_BYTES * -(-shape[0] // num_ranks) * math.prod(shape[1:]) for shape in shapes)


def _chunk_bytes(config: RunConfig, dtypes: Mapping[str, str]) -> int:
    """Return the size of a step's Arrow files without rows: one file per worker of each producer."""
    ranks = config.runtime.num_policy_ranks
    num_chunks = {
        "rollout": -(-config.rollout.num_prompts // config.rollout.prompts_per_batch),
        "logprob": ranks,
        "reference": config.runtime.num_reference_ranks if config.needs_reference_worker else ranks,
        "advantage": 1,
    }
    total = 0
    for producer, count in num_chunks.items():
        fields = [(name, dtype) for name, dtype in dtypes.items() if column_spec(name).producer == producer]
        if fields:
            empty = pa.record_batch({name: pa.array([], arrow_type(name, dtype)) for name, dtype in fields})
            total += count * encoded_bytes(empty)
    return total


def _total(columns: Sequence[ColumnBytes]) -> int:
    return sum(column.num_bytes for column in columns)


def _warnings(config: RunConfig, plan: StepPlan, most_store_bytes: int) -> tuple[str, ...]:
    warnings = []
    fewest = min(update.num_live_sequences for update in plan.updates)
    if plan.num_ranks > fewest:
        warnings.append(
            f"runtime.num_policy_ranks = {plan.num_ranks}, but an update has {fewest} rows: the "
            f"other ranks ({plan.num_ranks - fewest}) process only dummies; lower it, or optim.updates_per_step"
        )
    if len(plan.updates) < config.optim.updates_per_step:
        warnings.append(
            f"optim.updates_per_step = {config.optim.updates_per_step}, but there are only enough rows for "
            f"{len(plan.updates)}"
        )
    if most_store_bytes > config.store.capacity_bytes:
        warnings.append(
            f"with every response of {config.rollout.max_response_tokens} tokens the columns of one step take "
            f"{most_store_bytes} bytes, more than store.capacity_bytes = {config.store.capacity_bytes}"
        )
    return tuple(warnings)
