"""The rows, plans and columns of one step of a config, computed before anything is started."""

import os
from collections.abc import Mapping, Sequence

import pyarrow as pa
import torch
from pydantic import NonNegativeInt, PositiveInt

from flows.plan.simulate import ColumnBytes, LengthShape, SimulatedStep, column_bytes, column_dtypes, simulate_step
from infra.datasets import PromptDataset
from infra.models.load import num_embeddings
from infra.workers.layout import decide_device
from rl_core.columns.codec import arrow_type, encoded_bytes
from rl_core.planning import plan_forward, plan_step
from schemas.base import Frozen
from schemas.catalog import column_spec
from schemas.config.environment import EnvironmentConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.plan import ForwardPlan, StepPlan, UpdatePlan


class Footprint(Frozen):
    """The rows of one step, their plans, and what their columns take in the store."""

    num_rows: PositiveInt
    num_reused: NonNegativeInt  # of these rows: those of stored groups
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
    micro_tokens: PositiveInt  # the most that a micro-batch computes, padding included, with the longest responses
    environments: tuple[EnvironmentConfig, ...]  # that answer the model's turns
    plan: StepPlan
    forward: ForwardPlan  # of a scoring pass
    warnings: tuple[str, ...]

    @property
    def pad_waste(self) -> float:
        """The fraction of a padded batch that is padding."""
        return 1 - (self.prompt_tokens + self.response_tokens) / self.padded_tokens

    @property
    def num_micros(self) -> int:
        """The most micro-batches with rows that a rank has in an update."""
        ranks = (rank for update in self.plan.updates for rank in update.ranks)
        return max(sum(bool(micro.rows) for micro in rank) for rank in ranks)

    def check_capacity(self) -> None:
        """Check that the store can hold the step.

        Raises:
            ConfigError: It can't.
        """
        if self.store_bytes > self.capacity_bytes:
            raise ConfigError(
                f"the columns of one step take {self.store_bytes} bytes, more than store.capacity_bytes = "
                f"{self.capacity_bytes}; raise it, or lower rollout.num_prompts, rollout.samples_per_prompt, "
                "rollout.max_response_tokens or data.reuse.num_groups"
            )


def measure_step(
    config: RunConfig, shape: LengthShape = "lognormal", fill: float = 0.5, data: PromptDataset | None = None
) -> Footprint:
    """Simulate a step and return its footprint. Every response token counts as trained.

    Args:
        config: The run, checked by `flows.preflight.check`.
        shape: The distribution of the response lengths, see `simulate.draw_lengths`.
        fill: The mean response length, as a fraction of `rollout.max_response_tokens`; above 0, at most 1.
        data: The training prompts; None loads them.

    Raises:
        UserError: The model or the data is not usable.
        PlanError: A row is over the token budget.
    """
    step = simulate_step(config, shape, fill, data)
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
        num_reused=len(prompts) - step.num_sampled,
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
        micro_tokens=_micro_tokens(config, plan.updates, step),
        environments=config.environments,
        plan=plan,
        forward=plan_forward(prompts, responses, **packing),
        warnings=_warnings(config, plan, most_store_bytes),
    )


def _micro_tokens(config: RunConfig, updates: Sequence[UpdatePlan], step: SimulatedStep) -> int:
    lengths = step.prompt_lengths + step.response_lengths
    if config.packing.kind == "padded":
        micros = [micro.rows for update in updates for rank in update.ranks for micro in rank if micro.rows]
        return max(len(rows) * int(lengths[list(rows)].max()) for rows in micros)
    longest = step.at_longest()
    return min(config.packing.token_budget, int((longest.prompt_lengths + longest.response_lengths).sum()))


def _chunk_bytes(config: RunConfig, dtypes: Mapping[str, str]) -> int:
    """Return the size of a step's Arrow files without rows: one file per worker of each producer."""
    ranks = config.runtime.num_policy_ranks
    groups = config.rollout.num_prompts, config.data.reuse.num_groups if config.data.reuse else 0
    num_chunks = {
        "rollout": sum(-(-count // config.rollout.prompts_per_batch) for count in groups),
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


def check_capacity(config: RunConfig, prompts: PromptDataset) -> None:
    """Check that the column store can hold a simulated step, and that this machine has the GPUs that are asked for.

    A cluster's GPUs are only known once it is connected to.

    Args:
        config: The run.
        prompts: Its training prompts, as `flows.preflight.check` returns them.

    Raises:
        UserError: It can't, or has too few, or the model or the data is not usable.
        PlanError: A row is over the token budget.
    """
    if config.services.ray_address is None and config.runtime.device == "cuda":
        decide_device(config, [torch.cuda.device_count()], os.cpu_count() or 1)
    measure_step(config, data=prompts).check_capacity()
