"""The fields of other trainers' padded batches, and the columns that they become.

B rows, P prompt positions, R response positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from rl_core.columns.jagged import Array
from rl_core.padded.nesting import RunLengths
from schemas.catalog import Axis, column_spec
from schemas.errors import ColumnError

Rule = Literal["tokens", "positions"]  # prompt and response ids concatenated, or clip(cumsum(mask) - 1, 0)


@dataclass(frozen=True)
class PaddedField:
    """The column that a field becomes.

    A field on the response axis with a row column, such as verl's advantages, repeats one value over the trained tokens
    of a row: the value is stored once, and is 0 for a row without trained tokens.
    """

    column: str
    axis: Axis  # the field is [B, P], [B, R], or [B] (`row`)
    dtype: str  # the catalog's, or `token`: the narrowest that holds the vocabulary
    pad: int = 0  # the padding of the rebuilt field; a `token` field is padded with the pad token


@dataclass(frozen=True)
class PaddedLayout:
    """The fields of a trainer's padded batch; any other field is unknown."""

    name: str
    fields: Mapping[str, PaddedField]  # the stored fields
    masks: Mapping[str, tuple[Axis, ...]]  # the existing tokens on its axes, concatenated; kept as run lengths
    derived: Mapping[str, Rule] = field(default_factory=dict)  # [B, P + R], checked but not stored
    channels: Mapping[str, str] = field(default_factory=dict)  # [B, C, P + R], to columns <axis>_<stem>_<channel>
    scalars: frozenset[str] = frozenset()  # one number for the whole batch

    @property
    def ids(self) -> dict[Axis, str]:
        """The field of token ids on each axis."""
        return {entry.axis: name for name, entry in self.fields.items() if entry.dtype == "token"}

    @property
    def loss_mask(self) -> str:
        """The field that marks the trained tokens; a batch without it trains all existing tokens."""
        return next(name for name, entry in self.fields.items() if entry.column == "loss_mask")

    def stored_fields(
        self, names: Collection[str], row_scalars: Mapping[str, str], token_fields: Mapping[str, str]
    ) -> dict[str, PaddedField]:
        """Return the stored fields of a batch with the given field names.

        Args:
            names: The fields of the batch.
            row_scalars: The caller's fields of shape [B] and their row columns; they replace fields of the layout with
                the same name.
            token_fields: The caller's fields of shape [B, R] and their columns on the response axis; likewise.

        Raises:
            ColumnError: The batch lacks a required field, or a column is on another axis or has two fields.
        """
        own = {}
        for axis, declared in (("row", row_scalars), ("response", token_fields)):
            for name, column in declared.items():
                spec = column_spec(column)
                if spec.axis != axis:
                    raise ColumnError(f"field {name!r} can't become {column!r}, which is on the {spec.axis} axis")
                own[name] = PaddedField(column, spec.axis, spec.dtypes[0])
        require_names(names, [*self.ids.values(), *self.masks, *own], f"the {self.name} batch lacks")
        fields = {name: entry for name, entry in {**self.fields, **own}.items() if name in names}
        columns = [entry.column for entry in fields.values()]
        if repeated := sorted({column for column in columns if columns.count(column) > 1}):
            raise ColumnError(f"more than one field becomes {', '.join(repeated)}: declare only one")
        return fields

    def shapes(
        self, fields: Mapping[str, PaddedField], num_rows: int, widths: Mapping[Axis, int]
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all fields of the layout and of the stored `fields`; `widths` are P and R."""
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.scalars, ())
        shapes |= dict.fromkeys(self.derived, (num_rows, sum(widths.values())))
        shapes |= {name: (num_rows, sum(widths[axis] for axis in axes)) for name, axes in self.masks.items()}
        shapes |= {name: (num_rows, widths[e.axis]) if e.axis in widths else (num_rows,) for name, e in fields.items()}
        return shapes


# `DataProto.batch` of verl 0.9, after its reward stage. Advantages that differ within a row, as with GAE, are declared
# as `token_fields={"advantages": "token_advantages"}`. Positions are derived, unless they have several channels.
VERL = PaddedLayout(
    name="verl",
    fields={
        "prompts": PaddedField("prompt_ids", "prompt", "token"),
        "responses": PaddedField("response_ids", "response", "token"),
        "response_mask": PaddedField("loss_mask", "response", "bool"),
        "rollout_log_probs": PaddedField("sampler_logprobs", "response", "float"),
        "old_log_probs": PaddedField("behavior_logprobs", "response", "float"),
        "ref_log_prob": PaddedField("reference_logprobs", "response", "float"),
        "advantages": PaddedField("advantages", "response", "float"),
        "token_level_scores": PaddedField("token_scores", "response", "float"),
        "token_level_rewards": PaddedField("token_rewards", "response", "float"),
        "returns": PaddedField("returns", "response", "float"),
        "values": PaddedField("values", "response", "float"),
        "entropys": PaddedField("entropies", "response", "float"),
    },
    masks={"attention_mask": ("prompt", "response")},
    derived={"input_ids": "tokens", "position_ids": "positions"},
    channels={"position_ids": "positions"},
)

# The result of TRL's `GRPOTrainer._generate_and_score_completions` for text. With `mask_truncated_completions`, TRL
# itself masks truncated completions as if none of their tokens existed.
TRL = PaddedLayout(
    name="TRL",
    fields={
        "prompt_ids": PaddedField("prompt_ids", "prompt", "token"),
        "completion_ids": PaddedField("response_ids", "response", "token"),
        "tool_mask": PaddedField("loss_mask", "response", "bool", pad=1),
        "sampling_per_token_logps": PaddedField("sampler_logprobs", "response", "float"),
        "old_per_token_logps": PaddedField("behavior_logprobs", "response", "float"),
        "ref_per_token_logps": PaddedField("reference_logprobs", "response", "float"),
        "advantages": PaddedField("advantages", "row", "float"),
    },
    masks={"prompt_mask": ("prompt",), "completion_mask": ("response",)},
    scalars=frozenset({"num_items_in_batch"}),
)


def channel_column(axis: Axis, stem: str, channel: int) -> str:
    """Return the column of one channel of a field on one axis."""
    return f"{axis}_{stem}_{channel}"


def derive(rule: Rule, ids: Sequence[Array], exists: Mapping[Axis, npt.NDArray[np.bool_]]) -> Array:
    """Rebuild a derived field, [B, P + R], from the ids and masks of the prompt and response axes."""
    if rule == "tokens":
        return np.concatenate(ids, axis=1)
    return np.clip(np.cumsum(np.concatenate(list(exists.values()), axis=1), axis=1) - 1, 0, None)


def require_names(present: Iterable[str], names: list[str], prefix: str) -> None:
    """Check that all `names` are present.

    Raises:
        ColumnError: A name is missing; the message begins with `prefix`.
    """
    if missing := [name for name in names if name not in set(present)]:
        raise ColumnError(f"{prefix} {', '.join(missing)}, expected {', '.join(names)}")


@dataclass(frozen=True, eq=False)
class Geometry:
    """Masks, stored fields, dtypes and scalars of a padded batch."""

    runs: Mapping[Axis, RunLengths]  # the mask of each axis, with its width
    fields: Mapping[str, PaddedField]  # the stored fields
    dtypes: Mapping[str, str]  # torch's names, for the fields that are tensors
    scalars: Mapping[str, float]
    channels: Mapping[str, int] = field(default_factory=dict)  # the number of channels of each field that has several
