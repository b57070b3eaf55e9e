"""What a step of a config would take, drawn before anything is started: rows, tokens, plans, bytes.

N rows of a step. Prompts are those of the data file's first step; response lengths are drawn.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt
from transformers import PreTrainedModel

from infra.datasets import PromptRow, load_train_prompts
from infra.models.load import build_meta_model, load_tokenizer, num_embeddings
from infra.models.lora import add_adapter
from rl_core.columns.codec import arrow_type, encoded_bytes
from rl_core.columns.jagged import token_dtype
from rl_core.planning import plan_forward, plan_step
from schemas.base import Frozen
from schemas.catalog import CATALOG, TOKEN_DTYPES, Axis, column_spec
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.plan import ForwardPlan, StepPlan

LengthShape = Literal["lognormal", "uniform"]
LOGNORMAL_SIGMA = 0.8
FLOAT_BYTES = 4  # weights, gradients and both of Adam's moments are float32
ADAM_MOMENTS = 2


class ColumnBytes(Frozen):
    """One column of a step."""

    name: str
    axis: Axis
    dtype: str
    num_values: NonNegativeInt
    num_bytes: NonNegativeInt  # values and row offsets


class RankBytes(Frozen):
    """What one rank holds at all times, in bytes; activations and gathered layers come on top."""

    weights: NonNegativeInt
    gradients: NonNegativeInt
    optimizer: NonNegativeInt
    previous: NonNegativeInt  # the weights of the version before, where it samples the next step; else 0
    reference: NonNegativeInt  # of a rank of the reference's own workers; 0 without


class Footprint(Frozen):
    """What one step takes."""

    num_rows: PositiveInt
    prompt_tokens: PositiveInt
    response_tokens: PositiveInt
    longest_prompt: PositiveInt  # tokens
    longest_response: PositiveInt  # tokens
    padded_tokens: PositiveInt  # of the same rows, padded to the longest prompt and the longest response
    columns: tuple[ColumnBytes, ...]  # all but the parts of the reward, whose names its function decides
    chunk_bytes: NonNegativeInt  # what Arrow's files add to the columns
    store_bytes: PositiveInt  # the peak, when all columns of the step are there
    most_store_bytes: PositiveInt  # the same with every response of the most tokens
    capacity_bytes: PositiveInt
    rank_bytes: RankBytes
    plan: StepPlan
    forward: ForwardPlan  # of a scoring pass
    warnings: tuple[str, ...]

    @property
    def pad_waste(self) -> float:
        """The share of a padded batch that is no token."""
        return 1 - (self.prompt_tokens + self.response_tokens) / self.padded_tokens

    def check_capacity(self) -> None:
        """See that the store can hold the step.

        Raises:
            ConfigError: It can't.
        """
        if self.store_bytes > self.capacity_bytes:
            raise ConfigError(
                f"the columns of one step take {self.store_bytes} bytes, more than store.capacity_bytes = "
                f"{self.capacity_bytes}; raise it, or lower rollout.num_prompts, rollout.samples_per_prompt or "
                "rollout.max_response_tokens"
            )


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """The rows of a step before it is run."""

    prompts: Sequence[PromptRow]  # N
    response_lengths: NDArray[np.int64]  # [N], tokens, at least 1
    samples_per_prompt: int
    max_response_tokens: int

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """[N], tokens."""
        return np.array([len(prompt.prompt_ids) for prompt in self.prompts], dtype=np.int64)

    def at_most(self) -> "SimulatedStep":
        """The same rows, every response of the most tokens."""
        full = np.full_like(self.response_lengths, self.max_response_tokens)
        return SimulatedStep(self.prompts, full, self.samples_per_prompt, self.max_response_tokens)


def measure_step(config: RunConfig, shape: LengthShape = "lognormal", fill: float = 0.5) -> Footprint:
    """Draw a step and say what it takes. A response's every token counts as trained.

    Args:
        config: The run, checked by `flows.cli.preflight.check`.
        shape: Of the response lengths, see `draw_lengths`; the config's seed draws them.
        fill: Their mean, as a share of `rollout.max_response_tokens`; above 0, at most 1.

    Raises:
        UserError: The model or the data is not usable.
        PlanError: A row is over the token budget.
    """
    draw = simulate_step(config, shape, fill)
    prompts, responses = draw.prompt_lengths, draw.response_lengths
    packing = {"num_ranks": config.runtime.num_policy_ranks, "token_budget": config.packing.token_budget}
    plan = plan_step(
        prompts, responses, responses, num_updates=config.optim.updates_per_step, seed=config.seed, **packing
    )
    dtypes = column_dtypes(config, num_embeddings(config.model))
    columns, chunk_bytes = column_bytes(draw, dtypes), _chunk_bytes(config, dtypes)
    store_bytes = _total(columns) + chunk_bytes
    most_store_bytes = _total(column_bytes(draw.at_most(), dtypes)) + chunk_bytes
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


def simulate_step(config: RunConfig, shape: LengthShape, fill: float) -> SimulatedStep:
    """The prompts of step 0, each as often as it is sampled, and drawn response lengths."""
    rollout = config.rollout
    data = load_train_prompts(config.data, load_tokenizer(config.model))
    rows = data.rows_for_step(0, rollout.num_prompts, config.seed, config.data.shuffle)
    prompts = [data[row] for row in rows for _ in range(rollout.samples_per_prompt)]
    random = np.random.Generator(np.random.PCG64(config.seed))
    lengths = draw_lengths(random, shape, fill, rollout.max_response_tokens, len(prompts))
    return SimulatedStep(prompts, lengths, rollout.samples_per_prompt, rollout.max_response_tokens)


def draw_lengths(
    random: np.random.Generator, shape: LengthShape, fill: float, most: int, count: int
) -> NDArray[np.int64]:
    """Response lengths from 1 to `most` tokens: [count] int64.

    Args:
        random: Draws them.
        shape: lognormal: log lengths of standard deviation `LOGNORMAL_SIGMA`, cut off at `most` as generation is;
            uniform: the widest range of the mean asked for.
        fill: The mean, before the cut, as a share of `most`.
        most: The longest.
        count: How many.

    Raises:
        ConfigError: `fill` is not above 0 and at most 1.
    """
    if not 0 < fill <= 1:
        raise ConfigError(f"fill is {fill}, expected a share of rollout.max_response_tokens above 0 and at most 1")
    if shape == "uniform":
        drawn = random.uniform(max(0.0, 2 * fill - 1) * most, min(1.0, 2 * fill) * most, count)
    else:
        drawn = random.lognormal(math.log(fill * most) - LOGNORMAL_SIGMA**2 / 2, LOGNORMAL_SIGMA, count)
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)


def column_dtypes(config: RunConfig, vocab_size: int) -> dict[str, str]:
    """The columns that a step of the run has, but a reward's parts, and the dtype of each."""
    token = "uint16" if token_dtype(vocab_size) == np.uint16 else "int32"
    return {
        name: token if spec.dtypes == TOKEN_DTYPES else spec.dtypes[0]
        for name, spec in CATALOG.items()
        if spec.producer != "reference" or config.kl.coef
    }


def column_bytes(draw: SimulatedStep, dtypes: Mapping[str, str]) -> tuple[ColumnBytes, ...]:
    """What each column of the drawn rows takes; of `response_text`, what so many of the prompts' tokens take."""
    num_rows, text_bytes = len(draw.prompts), _text_bytes(draw)
    counts = {
        "row": num_rows,
        "prompt": int(draw.prompt_lengths.sum()),
        "response": int(draw.response_lengths.sum()),
    }
    columns = []
    for name, dtype in dtypes.items():
        axis, of_type = column_spec(name).axis, arrow_type(name, dtype)
        if pa.types.is_string(of_type):
            num_bytes = 4 * (num_rows + 1) + text_bytes[name]
        elif pa.types.is_large_list(of_type):
            num_bytes = 8 * (num_rows + 1) + math.ceil(counts[axis] * of_type.value_type.bit_width / 8)
        else:
            num_bytes = math.ceil(counts[axis] * of_type.bit_width / 8)
        columns.append(ColumnBytes(name=name, axis=axis, dtype=dtype, num_values=counts[axis], num_bytes=num_bytes))
    return tuple(columns)


def rank_bytes(config: RunConfig) -> RankBytes:
    """What the fullest rank holds. Parameters are split along their first dimension, in as many equal parts.

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


def _text_bytes(draw: SimulatedStep) -> dict[str, int]:
    """UTF-8 bytes of the text columns over all rows."""
    prompts, responses = draw.prompts, draw.response_lengths
    prompt_text = sum(len(prompt.prompt_text.encode()) for prompt in prompts)
    groups = [divmod(row, draw.samples_per_prompt) for row in range(len(prompts))]
    num_cut = int((responses == draw.max_response_tokens).sum())
    return {
        "prompt_text": prompt_text,
        "response_text": round(prompt_text / draw.prompt_lengths.sum() * responses.sum()),
        "answer": sum(len(prompt.answer.encode()) for prompt in prompts),
        "info": sum(len(json.dumps(prompt.info, default=str).encode()) for prompt in prompts),
        "sample_id": sum(len(f"0-{group}-{sample}") for group, sample in groups),
        "finish_reason": len("length") * num_cut + len("stop") * (len(prompts) - num_cut),
    }


def _chunk_bytes(config: RunConfig, dtypes: Mapping[str, str]) -> int:
    """What the Arrow files of a step take without rows: one for each producer's worker."""
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
            f"runtime.num_policy_ranks = {plan.num_ranks}, but an update has {fewest} rows: "
            f"{plan.num_ranks - fewest} of them get dummies only; lower it, or optim.updates_per_step"
        )
    if len(plan.updates) < config.optim.updates_per_step:
        warnings.append(
            f"optim.updates_per_step = {config.optim.updates_per_step}, but there are rows for {len(plan.updates)}"
        )
    if most_store_bytes > config.store.capacity_bytes:
        warnings.append(
            f"with every response of {config.rollout.max_response_tokens} tokens the columns of one step take "
            f"{most_store_bytes} bytes, more than store.capacity_bytes = {config.store.capacity_bytes}"
        )
    return tuple(warnings)
