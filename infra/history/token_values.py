"""Values of response tokens: the stored ones, and those that follow from them; and as JSON can hold them.

N rows, T tokens of their responses.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rl_core.columns.jagged import TURN_COLUMNS, advantages_of_turns
from schemas.base import Frozen
from schemas.catalog import column_spec

Scale = Literal["signed", "magnitude", "category"]  # differences; numbers of one sign; labels
TokenValues = dict[str, NDArray[Any]]  # by name, in the order of the choice: [T] each

ADVANTAGES, GAP, KL, TEACHER_KL, MASK = "advantages", "gap", "kl", "teacher_kl", "loss_mask"
SAMPLER, BEHAVIOR, REFERENCE = "sampler_logprobs", "behavior_logprobs", "reference_logprobs"
TEACHER = "teacher_logprobs"
SIGNED = (ADVANTAGES, GAP, KL, TEACHER_KL, "token_advantages", "token_scores", "token_rewards", "returns", "values")
FIRST = (ADVANTAGES, GAP, KL, TEACHER_KL, SAMPLER, MASK, "sampler_versions")  # of the choice


class ValueSpec(Frozen):
    """What is known about a value of tokens."""

    name: str
    title: str
    unit: str
    scale: Scale


def value_columns(names: Collection[str]) -> list[str]:
    """Return which columns of a batch hold, or determine, the values of response tokens."""
    specs = [column_spec(name) for name in names]
    stored = [spec.name for spec in specs if spec.axis == "response" and not spec.is_vector]
    return [name for name in stored if name != "response_ids"] + [
        name for name in (ADVANTAGES, *TURN_COLUMNS) if name in names
    ]


def token_values(columns: Mapping[str, pa.Array], lengths: NDArray[np.int64]) -> TokenValues:
    """Return all values of the tokens of N rows.

    `gap` is the behavior minus the sampler's log-prob. `kl` is the k1 estimate: the behavior's log-prob or, in a step
    that has none, the sampler's, minus the reference's; `teacher_kl` is the same of the teacher. A
    token's advantage is that of its turn, if turns have some; the teacher's term is not in it.

    Args:
        columns: Those of `value_columns`.
        lengths: The number of response tokens of each row, [N].
    """
    stored = {name: column for name, column in columns.items() if column_spec(name).axis == "response"}
    found: TokenValues = {
        name: np.asarray(column.flatten().to_numpy(zero_copy_only=False)) for name, column in stored.items()
    }
    if all(name in columns for name in TURN_COLUMNS):
        found[ADVANTAGES] = advantages_of_turns(*(columns[name] for name in TURN_COLUMNS))
    elif ADVANTAGES in columns:
        found[ADVANTAGES] = np.repeat(columns[ADVANTAGES].to_numpy(zero_copy_only=False), lengths)
    if SAMPLER in found and BEHAVIOR in found:
        found[GAP] = found[BEHAVIOR] - found[SAMPLER]
    scored = found.get(BEHAVIOR, found.get(SAMPLER))
    if scored is not None and REFERENCE in found:
        found[KL] = scored - found[REFERENCE]
    if scored is not None and TEACHER in found:
        found[TEACHER_KL] = scored - found[TEACHER]
    order = [name for name in FIRST if name in found]
    return {name: found[name] for name in [*order, *(name for name in found if name not in order)]}


def value_spec(name: str) -> ValueSpec:
    """Return what is known about a value of `token_values`."""
    if name == GAP:
        return ValueSpec(name=name, title="log-prob gap: behavior - sampler", unit="nat", scale="signed")
    if name == KL:
        return ValueSpec(name=name, title="KL to the reference (k1)", unit="nat", scale="signed")
    if name == TEACHER_KL:
        return ValueSpec(name=name, title="reverse KL to the teacher (k1)", unit="nat", scale="signed")
    spec = column_spec(name)
    is_label = spec.dtypes in (("bool",), ("int32",))
    scale: Scale = "category" if is_label else "signed" if name in SIGNED else "magnitude"
    return ValueSpec(name=name, title=name.replace("_", " "), unit=spec.unit, scale=scale)


def row_statistics(values: TokenValues, lengths: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Return statistics of each row's trained tokens: [N] each, NaN for a row without one.

    `gap_mean`, `gap_max` (of the absolute gap), `kl_mean`, `teacher_kl_mean` and `sampler_logprob_mean`, of the values
    that there are.
    """
    rows = np.repeat(np.arange(len(lengths)), lengths)
    trained = values.get(MASK)
    kept = slice(None) if trained is None else np.asarray(trained, dtype=bool)
    rows = rows[kept]
    counts = np.bincount(rows, minlength=len(lengths))
    found = {}
    for column, name in (
        ("gap_mean", GAP),
        ("kl_mean", KL),
        ("teacher_kl_mean", TEACHER_KL),
        ("sampler_logprob_mean", SAMPLER),
    ):
        if name in values:
            sums = np.bincount(rows, weights=values[name][kept], minlength=len(lengths))
            found[column] = np.divide(sums, counts, out=np.full(len(lengths), np.nan), where=counts > 0)
    if GAP in values:
        largest = np.zeros(len(lengths))
        np.maximum.at(largest, rows, np.abs(values[GAP][kept], dtype=np.float64))
        found["gap_max"] = np.where(counts > 0, largest, np.nan)
    order = ("gap_mean", "gap_max", "kl_mean", "teacher_kl_mean", "sampler_logprob_mean")
    return {name: found[name] for name in order if name in found}


def json_safe(value: Any) -> Any:
    """Return a value of Python's own types with numbers that are not finite as the texts `NaN` and `±Infinity`."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value
