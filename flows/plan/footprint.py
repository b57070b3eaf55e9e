"""The rows, plans and columns of one step of a config, computed before anything is started.

The prompts are those of the data file's first step; response lengths are drawn at random.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt

from infra.datasets import PromptDataset, PromptRow, load_train_prompts
from infra.datasets.sft import SftDataset, load_train_rows
from infra.engines.families import with_sharing
from infra.models.load import experts_dtype, load_tokenizer, num_embeddings
from infra.workers.layout import decide_device
from rl_core.columns.codec import arrow_type, encoded_bytes, value_bits
from rl_core.columns.jagged import PREFIX_COLUMN, token_dtype
from rl_core.columns.prompts import find_prefixes
from rl_core.planning import plan_forward, plan_step
from rl_core.rollout.chat import decode_texts
from rl_core.rollout.curriculum import plan_sources
from rl_core.training.rows import MASK_COLUMNS, TOP_COLUMNS
from schemas.base import Frozen
from schemas.catalog import CATALOG, EXPERT_DTYPES, TOKEN_DTYPES, Axis, column_spec
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.plan import ForwardPlan, StepPlan, UpdatePlan

ASSUMED_MASK_TOKENS = 16  # that top-p or min-p leave at a position
PARTIAL_TOKEN_BYTES = 12  # of a response that is under way: its id, log-prob and version


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """The rows of a step that has not been run: of supervised fine-tuning, those that it will have."""

    prompts: Sequence[PromptRow]  # N
    response_lengths: NDArray[np.int64]  # [N], tokens, at least 1
    loss_tokens: NDArray[np.int64]  # [N]
    samples_per_prompt: int
    max_response_tokens: int
    rows_per_prompt: int  # that share a stored prompt: all samples, or 1 if an environment may give each its own
    max_turns: int = 1
    max_teacher_prompt_tokens: int = 0  # of a teacher that doesn't read the policy's prompts
    mask_tokens: int = 0  # that truncation leaves at a position; without a top-k, assumed
    prefixes: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None  # see `find_prefixes`

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Prompt lengths: [N], tokens."""
        return np.array([len(prompt.prompt_ids) for prompt in self.prompts], dtype=np.int64)

    def at_longest(self) -> "SimulatedStep":
        """Return the same rows with every response at its maximum length."""
        return replace(self, response_lengths=np.full_like(self.response_lengths, self.max_response_tokens))


class ColumnBytes(Frozen):
    """The size of one column of a step."""

    name: str
    axis: Axis
    dtype: str
    num_values: NonNegativeInt
    num_bytes: NonNegativeInt  # values and row offsets


class Footprint(Frozen):
    """The rows of one step, their plans, and what their columns take in the store."""

    num_rows: PositiveInt
    num_reused: NonNegativeInt  # of these rows: those of stored groups
    prompt_tokens: PositiveInt
    response_tokens: PositiveInt
    loss_tokens: PositiveInt
    longest_prompt: PositiveInt  # tokens
    padded_tokens: PositiveInt  # of the same rows, padded to the longest prompt and the longest response
    columns: tuple[ColumnBytes, ...]  # without reward parts, whose names only the reward function defines
    chunk_bytes: NonNegativeInt  # overhead of the Arrow files
    partial_bytes: NonNegativeInt  # of later steps' responses that are under way, each at its longest, in the store
    store_bytes: PositiveInt  # the peak, when all columns of the step are stored, and `partial_bytes`
    most_store_bytes: PositiveInt  # the same with every response at its longest
    capacity_bytes: PositiveInt
    micro_tokens: PositiveInt  # the most that a micro-batch computes, padding included, with the longest responses
    num_micros: PositiveInt  # of a rank in an update, with the longest responses
    plan: StepPlan
    forward: ForwardPlan  # of a scoring pass
    shares_prompts: bool  # whether a prompt is computed once for its samples in a micro-batch
    sharing: str  # the same in words, and why
    warnings: tuple[str, ...]

    @property
    def pad_waste(self) -> float:
        """The fraction of a padded batch that is padding."""
        return 1 - (self.prompt_tokens + self.response_tokens) / self.padded_tokens

    @property
    def shared_tokens(self) -> int:
        """The tokens that the updates don't compute, as a prompt is computed once for samples of a micro-batch."""
        return self.prompt_tokens + self.response_tokens - sum(update.num_tokens for update in self.plan.updates)

    def check_capacity(self) -> None:
        """Check that the store can hold the step.

        Raises:
            ConfigError: It can't.
        """
        if self.store_bytes > self.capacity_bytes:
            raise ConfigError(
                f"the columns of one step take {self.store_bytes} bytes, more than store.capacity_bytes = "
                f"{self.capacity_bytes}; set it to at least {self.most_store_bytes}, which holds the longest responses "
                "too, or lower rollout.num_prompts, rollout.samples_per_prompt, rollout.max_response_tokens, "
                "data.reuse.num_groups or sft.num_rows"
            )


def measure_step(config: RunConfig, fill: float = 0.5, data: PromptDataset | None = None) -> Footprint:
    """Simulate a step and return its footprint. Every sampled token counts as trained.

    Args:
        config: The run, checked by `flows.preflight.check`.
        fill: The mean response length, as a fraction of `rollout.max_response_tokens`; 1: all are at their longest.
        data: The training prompts; None loads them.

    Raises:
        UserError: The model or the data is not usable.
        PlanError: A row is over the token budget.
    """
    step = simulate_step(config, fill, data)
    prompts, responses = step.prompt_lengths, step.response_lengths
    config, sharing = with_sharing(config)
    groups = np.arange(len(prompts)) // step.samples_per_prompt
    packing: dict[str, Any] = {
        "num_ranks": config.runtime.num_policy_ranks,
        "token_budget": config.packing.token_budget,
        "prefixes": (step.prefixes or (groups, prompts)) if config.packing.share_prompts else None,
    }
    plan = plan_step(
        prompts,
        responses,
        step.loss_tokens,
        num_updates=config.optim.updates_per_step,
        seed=config.seed,
        groups=groups,
        **packing,
    )
    dtypes = column_dtypes(config, num_embeddings(config.model))
    if not config.packing.share_prompts or step.prefixes is None:
        dtypes.pop(PREFIX_COLUMN, None)
    columns, chunk_bytes = column_bytes(step, dtypes), _chunk_bytes(config, dtypes)
    longest = step.at_longest()
    partial_bytes = _partial_bytes(config, longest.response_lengths)
    store_bytes = _total(columns) + chunk_bytes + _partial_bytes(config, responses)
    most_store_bytes = _total(column_bytes(longest, dtypes)) + chunk_bytes + partial_bytes
    return Footprint(
        num_rows=len(prompts),
        num_reused=0 if config.sft else len(prompts) - config.rollout.num_prompts * config.rollout.samples_per_prompt,
        prompt_tokens=int(prompts.sum()),
        response_tokens=int(responses.sum()),
        loss_tokens=int(step.loss_tokens.sum()),
        longest_prompt=int(prompts.max()),
        padded_tokens=len(prompts) * int(prompts.max() + responses.max()),
        columns=columns,
        chunk_bytes=chunk_bytes,
        partial_bytes=partial_bytes,
        store_bytes=store_bytes,
        most_store_bytes=most_store_bytes,
        capacity_bytes=config.store.capacity_bytes,
        micro_tokens=_micro_tokens(config, plan.updates, step),
        num_micros=_num_micros(config, plan, step),
        plan=plan,
        forward=plan_forward(prompts, responses, **packing),
        shares_prompts=bool(config.packing.share_prompts),
        sharing=sharing,
        warnings=_warnings(config, plan, most_store_bytes),
    )


def _partial_bytes(config: RunConfig, lengths: NDArray[np.int64]) -> int:
    """Return what the store has of responses that later steps finish: what a step left, and what the next leaves."""
    limits = [config.token_limit(ahead) for ahead in range(1, config.runtime.max_staleness)]
    return 2 * PARTIAL_TOKEN_BYTES * sum(int(np.minimum(lengths, limit).sum()) for limit in limits)


def _micro_tokens(config: RunConfig, updates: Sequence[UpdatePlan], step: SimulatedStep) -> int:
    lengths = step.prompt_lengths + step.response_lengths
    if config.packing.kind == "padded":
        micros = [micro.rows for update in updates for rank in update.ranks for micro in rank if micro.rows]
        return max(len(rows) * int(lengths[list(rows)].max()) for rows in micros)
    return min(config.packing.token_budget, _longest_tokens(config, step))


def _longest_tokens(config: RunConfig, step: SimulatedStep) -> int:
    """Return the tokens that are computed, at least, if every response is at its longest."""
    samples = step.samples_per_prompt if config.packing.share_prompts else 1
    num_tokens = int(step.prompt_lengths[::samples].sum() + step.at_longest().response_lengths.sum())
    if config.packing.share_prompts and step.prefixes is not None:
        numbers, common = step.prefixes
        num_tokens -= int(common.sum() - common[np.unique(numbers, return_index=True)[1]].sum())
    return num_tokens


def _num_micros(config: RunConfig, plan: StepPlan, step: SimulatedStep) -> int:
    num_tokens = _longest_tokens(config, step)
    drawn = max(sum(bool(micro.rows) for micro in rank) for update in plan.updates for rank in update.ranks)
    return max(drawn, -(-num_tokens // (len(plan.updates) * plan.num_ranks * plan.token_budget)))


def _chunk_bytes(config: RunConfig, dtypes: Mapping[str, str]) -> int:
    """Return the size of a step's Arrow files without rows: one file per worker of each producer."""
    ranks = config.runtime.num_policy_ranks
    teachers = config.distillation.teachers.values() if config.distillation else ()
    groups = config.rollout.num_prompts, config.data.reuse.num_groups if config.data.reuse else 0
    num_chunks = {
        "rollout": 1 if config.sft else sum(-(-count // config.rollout.prompts_per_batch) for count in groups),
        "logprob": ranks,
        "reference": config.runtime.num_reference_ranks if config.needs_reference_worker else ranks,
        "teacher": sum(each.num_workers or ranks for each in teachers),
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
            f"other ranks ({plan.num_ranks - fewest}) process only dummies; lower it to that, or lower "
            "optim.updates_per_step"
        )
    if len(plan.updates) < config.optim.updates_per_step:
        warnings.append(
            f"optim.updates_per_step = {config.optim.updates_per_step}, but there are only enough rows for "
            f"{len(plan.updates)}; lower it to that"
        )
    if most_store_bytes > config.store.capacity_bytes:
        warnings.append(
            f"with every response of {config.rollout.max_response_tokens} tokens the columns of one step take "
            f"{most_store_bytes} bytes, more than store.capacity_bytes = {config.store.capacity_bytes}; set it to that"
        )
    return tuple(warnings)


def check_capacity(config: RunConfig, prompts: PromptDataset) -> None:
    """Check that the column store can hold a simulated step, and that this machine has the GPUs or cores that it needs.

    A cluster's are only known once it is connected to.

    Args:
        config: The run.
        prompts: Its training prompts, as `flows.preflight.check` returns them.

    Raises:
        UserError: It can't, or has too few, or the model or the data is not usable.
        PlanError: A row is over the token budget.
    """
    if config.services.ray_address is None:
        decide_device(config, [torch.cuda.device_count()], os.cpu_count() or 1)
    measure_step(config, data=prompts).check_capacity()


def simulate_step(config: RunConfig, fill: float, data: PromptDataset | None = None) -> SimulatedStep:
    """Return the prompts of step 0, repeated for their samples, and response lengths drawn with the config's seed.

    Stored groups that are trained on again have the prompts that would follow. Those of supervised fine-tuning are the
    rows themselves. See `measure_step`.
    """
    rollout = config.rollout
    if config.sft is not None:
        return _first_step(config, data or load_train_rows(config, load_tokenizer(config.model)))
    data = load_train_prompts(config.data, load_tokenizer(config.model)) if data is None else data
    first = plan_sources(config, range(1), {})[0] if config.data.curriculum else None
    groups = range(rollout.num_prompts + (config.data.reuse.num_groups if config.data.reuse else 0))
    rows = data.rows_for_groups(0, groups, rollout.num_prompts, config.seed, config.data.shuffle, first)
    prompts = [data[row] for row in rows for _ in range(rollout.samples_per_prompt)]
    random = np.random.Generator(np.random.PCG64(config.seed))
    lengths = draw_lengths(random, fill, rollout.max_response_tokens, len(prompts))
    turns = max((environment.max_turns for environment in config.environments), default=1)
    teachers = config.distillation.teachers.values() if config.distillation else ()
    longest = max((each.max_prompt_tokens for each in teachers if each.prompt is not None), default=0)
    return SimulatedStep(
        prompts=prompts,
        response_lengths=lengths,
        loss_tokens=lengths,
        samples_per_prompt=rollout.samples_per_prompt,
        max_response_tokens=rollout.max_response_tokens,
        rows_per_prompt=1 if any(each.kind != "tools" for each in config.environments) else rollout.samples_per_prompt,
        max_turns=turns,
        max_teacher_prompt_tokens=longest,
        mask_tokens=(rollout.top_k or ASSUMED_MASK_TOKENS) if rollout.sampling_mask else 0,
    )


def _first_step(config: RunConfig, data: PromptDataset) -> SimulatedStep:
    """Return the rows of the first step of supervised fine-tuning."""
    assert config.sft is not None
    assert isinstance(data, SftDataset)
    numbers = data.rows_for_step(0, config.sft.num_rows, config.seed, config.data.shuffle)
    tokenizer, rows = load_tokenizer(config.model), [data[number] for number in numbers]
    texts = decode_texts(tokenizer, [row.prompt_ids.tolist() for row in rows])
    return SimulatedStep(
        prompts=[replace(row, prompt_text=text) for row, text in zip(rows, texts, strict=True)],
        response_lengths=np.array([len(row.response_ids) for row in rows], dtype=np.int64),
        loss_tokens=np.array([row.loss_mask.sum() for row in rows], dtype=np.int64),
        prefixes=find_prefixes([row.prompt_ids for row in rows], sum(row.num_tokens for row in rows)),
        samples_per_prompt=1,
        rows_per_prompt=1,
        max_response_tokens=int(data.response_lengths.max()),
    )


def draw_lengths(random: np.random.Generator, fill: float, longest: int, count: int) -> NDArray[np.int64]:
    """Return response lengths from 1 to `longest` tokens, uniform over the widest range with this mean: [count] int64.

    Args:
        random: The random generator.
        fill: The mean, as a fraction of `longest`.
        longest: The maximum length, in tokens.
        count: The number of lengths.

    Raises:
        ConfigError: `fill` is not above 0 and at most 1.
    """
    if not 0 < fill <= 1:
        raise ConfigError(f"fill is {fill}, expected a fraction of rollout.max_response_tokens above 0 and at most 1")
    drawn = random.uniform(max(0.0, 2 * fill - 1) * longest, min(1.0, 2 * fill) * longest, count)
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64)


def column_dtypes(config: RunConfig, vocab_size: int) -> dict[str, str]:
    """Return the dtype of each column of a step, except reward parts, whose names only the reward function defines."""
    token = "uint16" if token_dtype(vocab_size) == np.uint16 else "int32"
    expert = experts_dtype(config.model) if config.rollout.router_replay else ""
    chosen: dict[tuple[str, ...], str] = {TOKEN_DTYPES: token, EXPERT_DTYPES: expert}
    absent = {
        "other trainers": True,
        "logprob": not config.scores_behavior,
        "reference": not config.kl.coef,
        "teacher": config.distillation is None,
        "advantage": config.sft is not None,
    }
    dtypes = {
        name: chosen.get(spec.dtypes, spec.dtypes[0])
        for name, spec in CATALOG.items()
        if not absent.get(spec.producer) and name not in _absent_columns(config)
    }
    if config.distillation is not None:
        dtypes |= {name: f"{dtypes[name]}[{config.distillation.top_k}]" for name in TOP_COLUMNS if name in dtypes}
    return {name: dtype for name, dtype in dtypes.items() if dtype}


def _absent_columns(config: RunConfig) -> set[str]:
    """Return the columns of rollout and teachers that a run lacks by its settings."""
    versions = set() if config.runtime.max_staleness > 1 else {"sampler_versions"}
    turns = {name for name, spec in CATALOG.items() if spec.axis == "turn" or name == "episode_end"}
    absent = versions if config.rollout.sampling_mask else {*versions, *MASK_COLUMNS}
    if config.distillation is None or not config.distillation.has_prompts:
        absent.add("teacher_prompt_ids")
    if config.distillation is None or not config.distillation.reads_top:
        absent.update(TOP_COLUMNS)
    absent.add(PREFIX_COLUMN if config.sft is None else "sampler_logprobs")
    return absent if config.environments else absent | turns


def column_bytes(step: SimulatedStep, dtypes: Mapping[str, str]) -> tuple[ColumnBytes, ...]:
    """Return the size of each column, assuming that a response token has as many bytes of text as a prompt token.

    Samples of a prompt share it. Prompts of teachers are counted at their longest.
    """
    num_rows, text_bytes = len(step.prompts), _text_bytes(step)
    counts = {
        "row": num_rows,
        "prompt": int(step.prompt_lengths[:: step.rows_per_prompt].sum()),
        "response": int(step.response_lengths.sum()),
        "turn": num_rows * step.max_turns,
        "teacher_prompt": num_rows * step.max_teacher_prompt_tokens,
        "sampling_mask": int(step.response_lengths.sum()) * step.mask_tokens,
    }
    columns = []
    for name, dtype in dtypes.items():
        axis, type_ = column_spec(name).axis, arrow_type(name, dtype)
        if pa.types.is_string(type_):
            num_bytes = 4 * (num_rows + 1) + text_bytes[name]
        elif pa.types.is_large_list(type_):
            num_bytes = 8 * (num_rows + 1) + math.ceil(counts[axis] * value_bits(type_) / 8)
        else:
            num_bytes = math.ceil(counts[axis] * value_bits(type_) / 8)
        columns.append(ColumnBytes(name=name, axis=axis, dtype=dtype, num_values=counts[axis], num_bytes=num_bytes))
    return tuple(columns)


def _text_bytes(step: SimulatedStep) -> dict[str, int]:
    """Return the UTF-8 bytes of each text column over all rows."""
    prompts, responses = step.prompts, step.response_lengths
    shared = prompts[:: step.rows_per_prompt]
    prompt_text = sum(len(prompt.prompt_text.encode()) for prompt in shared)
    token_bytes = prompt_text / sum(len(prompt.prompt_ids) for prompt in shared)
    groups = [divmod(row, step.samples_per_prompt) for row in range(len(prompts))]
    num_cut = int((responses == step.max_response_tokens).sum())
    return {
        "prompt_text": prompt_text,
        "response_text": round(token_bytes * responses.sum()),
        "answer": sum(len(prompt.answer.encode()) for prompt in shared),
        "info": sum(len(json.dumps(prompt.info, default=str).encode()) for prompt in shared),
        "sample_id": sum(len(f"0-{group}-{sample}") for group, sample in groups),
        "episode_end": len("turn_length") * len(prompts),
        "finish_reason": len("length") * num_cut + len("stop") * (len(prompts) - num_cut),
    }
