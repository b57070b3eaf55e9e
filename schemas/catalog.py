"""The column catalog: all columns with their axis, dtype, unit and producer.

Axes: `row` has one value per sample; `prompt` and `response` are jagged, with one list per sample, whose offsets say
which tokens exist; `turn` is jagged, too, with a value for each of the model's turns, and `teacher_prompt` with the
tokens that a teacher reads in place of the prompt; `sampling_mask` has the tokens that could be sampled, position after
position. A column's name is also the name
of the variable that holds it, everywhere in the code.
"""

import re
from typing import Literal, cast

from schemas.base import Frozen
from schemas.errors import ColumnError

Axis = Literal["row", "prompt", "response", "turn", "teacher_prompt", "sampling_mask"]

TOKEN_DTYPES = ("uint16", "int32")
EXPERT_DTYPES = ("uint8", "uint16")
PROMPT_TEXTS = ("prompt_text", "answer", "info")


class ColumnSpec(Frozen):
    """The declaration of one column."""

    name: str
    axis: Axis
    dtypes: tuple[str, ...]  # accepted Arrow value types, as str(pyarrow.DataType)
    producer: Literal["rollout", "logprob", "reference", "teacher", "advantage", "other trainers"]  # the stage; what
    # rollout makes is stored by the stage put
    unit: str = ""
    nullable: bool = False
    is_vector: bool = False  # each token has as many values, whose number is in the dtype: `uint8[16]`

    @property
    def is_of_prompt(self) -> bool:
        """Whether samples of one prompt have the same value, so that a rollout stores it once for them."""
        return self.axis == "prompt" or self.name in PROMPT_TEXTS


def _experts(axis: Axis) -> ColumnSpec:
    return ColumnSpec(
        name=f"{axis}_experts", axis=axis, dtypes=EXPERT_DTYPES, producer="rollout", unit="expert", is_vector=True
    )


def _teacher_top(what: str, dtypes: tuple[str, ...], unit: str) -> ColumnSpec:
    return ColumnSpec(
        name=f"teacher_top_{what}", axis="response", dtypes=dtypes, producer="teacher", unit=unit, is_vector=True
    )


def _by_name(*specs: ColumnSpec) -> dict[str, ColumnSpec]:
    return {spec.name: spec for spec in specs}


CATALOG: dict[str, ColumnSpec] = _by_name(
    ColumnSpec(name="prompt_ids", axis="prompt", dtypes=TOKEN_DTYPES, producer="rollout", unit="token id"),
    ColumnSpec(name="response_ids", axis="response", dtypes=TOKEN_DTYPES, producer="rollout", unit="token id"),
    ColumnSpec(name="loss_mask", axis="response", dtypes=("bool",), producer="rollout"),
    _experts("prompt"),
    _experts("response"),
    ColumnSpec(name="sampler_logprobs", axis="response", dtypes=("float",), producer="rollout", unit="nat"),
    ColumnSpec(name="sampling_mask_counts", axis="response", dtypes=("int32",), producer="rollout", unit="token"),
    ColumnSpec(
        name="sampling_mask_ids", axis="sampling_mask", dtypes=TOKEN_DTYPES, producer="rollout", unit="token id"
    ),
    ColumnSpec(name="sampler_versions", axis="response", dtypes=("int32",), producer="rollout"),
    ColumnSpec(name="behavior_logprobs", axis="response", dtypes=("float",), producer="logprob", unit="nat"),
    ColumnSpec(name="reference_logprobs", axis="response", dtypes=("float",), producer="reference", unit="nat"),
    ColumnSpec(
        name="teacher_prompt_ids", axis="teacher_prompt", dtypes=TOKEN_DTYPES, producer="rollout", unit="token id"
    ),
    ColumnSpec(name="teacher_logprobs", axis="response", dtypes=("float",), producer="teacher", unit="nat"),
    _teacher_top("logprobs", ("float",), "nat"),
    _teacher_top("ids", TOKEN_DTYPES, "token id"),
    ColumnSpec(name="advantages", axis="row", dtypes=("float",), producer="advantage", unit="reward"),
    ColumnSpec(name="reward", axis="row", dtypes=("float",), producer="rollout", nullable=True),
    ColumnSpec(name="prompt_text", axis="row", dtypes=("string",), producer="rollout"),
    ColumnSpec(name="response_text", axis="row", dtypes=("string",), producer="rollout"),
    ColumnSpec(name="answer", axis="row", dtypes=("string",), producer="rollout"),
    ColumnSpec(name="info", axis="row", dtypes=("string",), producer="rollout", unit="JSON"),
    ColumnSpec(name="sample_id", axis="row", dtypes=("string",), producer="rollout"),
    ColumnSpec(name="group_id", axis="row", dtypes=("int32",), producer="rollout"),
    ColumnSpec(name="prefix_tokens", axis="row", dtypes=("int32",), producer="rollout", unit="token"),
    ColumnSpec(name="finish_reason", axis="row", dtypes=("string",), producer="rollout"),
    ColumnSpec(name="turn_tokens", axis="turn", dtypes=("int32",), producer="rollout", unit="token"),
    # An environment's tokens after a turn; a column of another name would cost those that runs have stored.
    ColumnSpec(name="turn_bridge_tokens", axis="turn", dtypes=("int32",), producer="rollout", unit="token"),
    ColumnSpec(name="turn_parents", axis="turn", dtypes=("int32",), producer="rollout", unit="token"),
    ColumnSpec(name="turn_rewards", axis="turn", dtypes=("float",), producer="rollout", unit="reward"),
    ColumnSpec(name="turn_advantages", axis="turn", dtypes=("float",), producer="advantage", unit="reward"),
    ColumnSpec(name="episode_end", axis="row", dtypes=("string",), producer="rollout"),
    ColumnSpec(name="policy_version", axis="row", dtypes=("int32",), producer="rollout"),
    ColumnSpec(name="token_advantages", axis="response", dtypes=("float",), producer="other trainers", unit="reward"),
    ColumnSpec(name="token_scores", axis="response", dtypes=("float",), producer="other trainers", unit="reward"),
    ColumnSpec(name="token_rewards", axis="response", dtypes=("float",), producer="other trainers", unit="reward"),
    ColumnSpec(name="returns", axis="response", dtypes=("float",), producer="other trainers", unit="reward"),
    ColumnSpec(name="values", axis="response", dtypes=("float",), producer="other trainers", unit="reward"),
    ColumnSpec(name="entropies", axis="response", dtypes=("float",), producer="other trainers", unit="nat"),
)

REWARD_PART_PREFIX = "reward_"
_POSITIONS = re.compile(r"(?P<axis>prompt|response)_positions_\d+")


def column_spec(name: str) -> ColumnSpec:
    """Return the catalog entry of column `name`; `reward_<part>` columns share the entry of `reward`.

    A token with several positions, as in a picture, has one column for each: `prompt_positions_<n>` and
    `response_positions_<n>`.

    Raises:
        ColumnError: The catalog has no such column.

    Example:
        >>> spec = column_spec("sampler_logprobs")
        >>> spec.axis, spec.dtypes, spec.unit, spec.producer
        ('response', ('float',), 'nat', 'rollout')
        >>> column_spec("reward_format").nullable
        True
    """
    if name in CATALOG:
        return CATALOG[name]
    if name.startswith(REWARD_PART_PREFIX) and len(name) > len(REWARD_PART_PREFIX):
        return CATALOG["reward"].replace(name=name)
    if (positions := _POSITIONS.fullmatch(name)) is not None:
        axis = cast(Axis, positions["axis"])
        return ColumnSpec(name=name, axis=axis, dtypes=("int32",), producer="other trainers")
    raise ColumnError(f"column {name!r} is not in the catalog; declared columns: {', '.join(CATALOG)}")
