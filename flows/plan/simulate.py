"""A step simulated before anything is started: its N rows, and the bytes of their columns.

The prompts are those of the data file's first step; response lengths are drawn at random.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import NonNegativeInt

from infra.datasets import PromptDataset, PromptRow, load_train_prompts
from infra.models.load import experts_dtype, load_tokenizer
from rl_core.columns.codec import arrow_type, value_bits
from rl_core.columns.jagged import token_dtype
from rl_core.rollout.curriculum import plan_sources
from schemas.base import Frozen
from schemas.catalog import CATALOG, EXPERT_DTYPES, TOKEN_DTYPES, Axis, column_spec
from schemas.config.run import RunConfig
from schemas.errors import ConfigError

LengthShape = Literal["lognormal", "uniform"]
LOGNORMAL_SIGMA = 0.8


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """The rows of a step that has not been run."""

    prompts: Sequence[PromptRow]  # N
    response_lengths: NDArray[np.int64]  # [N], tokens, at least 1
    num_sampled: int  # of these rows; the others, the last ones, are of stored groups
    samples_per_prompt: int
    max_response_tokens: int
    max_turns: int = 1

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Prompt lengths: [N], tokens."""
        return np.array([len(prompt.prompt_ids) for prompt in self.prompts], dtype=np.int64)

    def at_longest(self) -> "SimulatedStep":
        """Return the same rows with every response at its maximum length."""
        full = np.full_like(self.response_lengths, self.max_response_tokens)
        return replace(self, response_lengths=full)

    def sampled(self) -> "SimulatedStep":
        """Return the rows that are sampled, without those of stored groups."""
        own = slice(self.num_sampled)
        return replace(self, prompts=self.prompts[own], response_lengths=self.response_lengths[own])


class ColumnBytes(Frozen):
    """The size of one column of a step."""

    name: str
    axis: Axis
    dtype: str
    num_values: NonNegativeInt
    num_bytes: NonNegativeInt  # values and row offsets


def simulate_step(
    config: RunConfig, shape: LengthShape, fill: float, data: PromptDataset | None = None
) -> SimulatedStep:
    """Return the prompts of step 0, repeated for their samples, and response lengths drawn with the config's seed.

    Stored groups that are trained on again have the prompts that would follow.

    Args:
        config: The run.
        shape: See `draw_lengths`.
        fill: See `draw_lengths`.
        data: The training prompts; None loads them.
    """
    rollout = config.rollout
    data = load_train_prompts(config.data, load_tokenizer(config.model)) if data is None else data
    first = plan_sources(config, range(1), {})[0] if config.data.curriculum else None
    num_prompts, num_reused = rollout.num_prompts, config.data.reuse.num_groups if config.data.reuse else 0
    groups = range(num_prompts + num_reused)
    rows = data.rows_for_groups(0, groups, num_prompts, config.seed, config.data.shuffle, first)
    prompts = [data[row] for row in rows for _ in range(rollout.samples_per_prompt)]
    random = np.random.Generator(np.random.PCG64(config.seed))
    lengths = draw_lengths(random, shape, fill, rollout.max_response_tokens, len(prompts))
    turns = max((environment.max_turns for environment in config.environments), default=1)
    samples = rollout.samples_per_prompt
    return SimulatedStep(prompts, lengths, num_prompts * samples, samples, rollout.max_response_tokens, turns)


def draw_lengths(
    random: np.random.Generator, shape: LengthShape, fill: float, longest: int, count: int
) -> NDArray[np.int64]:
    """Return response lengths from 1 to `longest` tokens: [count] int64.

    Args:
        random: The random generator.
        shape: "lognormal": log lengths with standard deviation `LOGNORMAL_SIGMA`, cut off at `longest` as generation
            does; "uniform": the widest range with this mean.
        fill: The mean before the cut-off, as a fraction of `longest`.
        longest: The maximum length, in tokens.
        count: The number of lengths.

    Raises:
        ConfigError: `fill` is not above 0 and at most 1.
    """
    if not 0 < fill <= 1:
        raise ConfigError(f"fill is {fill}, expected a fraction of rollout.max_response_tokens above 0 and at most 1")
    if shape == "uniform":
        drawn = random.uniform(max(0.0, 2 * fill - 1) * longest, min(1.0, 2 * fill) * longest, count)
    else:
        drawn = random.lognormal(math.log(fill * longest) - LOGNORMAL_SIGMA**2 / 2, LOGNORMAL_SIGMA, count)
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64)


def column_dtypes(config: RunConfig, vocab_size: int) -> dict[str, str]:
    """Return the dtype of each column of a step, except reward parts, whose names only the reward function defines."""
    token = "uint16" if token_dtype(vocab_size) == np.uint16 else "int32"
    expert = experts_dtype(config.model) if config.rollout.router_replay else ""
    chosen: dict[tuple[str, ...], str] = {TOKEN_DTYPES: token, EXPERT_DTYPES: expert}
    absent = {"other trainers": True, "logprob": not config.scores_behavior, "reference": not config.kl.coef}
    dtypes = {
        name: chosen.get(spec.dtypes, spec.dtypes[0])
        for name, spec in CATALOG.items()
        if not absent.get(spec.producer) and name not in _absent_columns(config)
    }
    return {name: dtype for name, dtype in dtypes.items() if dtype}


def _absent_columns(config: RunConfig) -> set[str]:
    """Return the rollout's columns that a run lacks by its settings."""
    versions = set() if config.runtime.max_staleness > 1 else {"sampler_versions"}
    turns = {name for name, spec in CATALOG.items() if spec.axis == "turn" or name == "episode_end"}
    return versions if config.environments else versions | turns


def column_bytes(step: SimulatedStep, dtypes: Mapping[str, str]) -> tuple[ColumnBytes, ...]:
    """Return the size of each column, assuming that a response token has as many bytes of text as a prompt token."""
    num_rows, text_bytes = len(step.prompts), _text_bytes(step)
    counts = {
        "row": num_rows,
        "prompt": int(step.prompt_lengths.sum()),
        "response": int(step.response_lengths.sum()),
        "turn": num_rows * step.max_turns,
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
    prompt_text = sum(len(prompt.prompt_text.encode()) for prompt in prompts)
    groups = [divmod(row, step.samples_per_prompt) for row in range(len(prompts))]
    num_cut = int((responses == step.max_response_tokens).sum())
    return {
        "prompt_text": prompt_text,
        "response_text": round(prompt_text / step.prompt_lengths.sum() * responses.sum()),
        "answer": sum(len(prompt.answer.encode()) for prompt in prompts),
        "info": sum(len(json.dumps(prompt.info, default=str).encode()) for prompt in prompts),
        "sample_id": sum(len(f"0-{group}-{sample}") for group, sample in groups),
        "episode_end": len("turn_length") * len(prompts),
        "finish_reason": len("length") * num_cut + len("stop") * (len(prompts) - num_cut),
    }
