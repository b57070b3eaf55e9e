"""The kept steps of one run, as rows and tokens. N rows of a step, T tokens of all its responses."""

from collections.abc import Callable, Collection, Iterator
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from infra.storage.runs import RunDirectory
from infra.stores.offline import RunColumns, find_batch, open_run_columns
from rl_core.columns.codec import arrow_type
from rl_core.columns.jagged import TURN_COLUMNS, advantages_of_turns
from rl_core.views import decode_ints
from schemas.batch import BatchHandle
from schemas.catalog import Axis, column_spec
from schemas.config.model import ModelConfig
from schemas.errors import RunError
from schemas.plan import StepPlan

IDS: dict[Axis, str] = {"prompt": "prompt_ids", "response": "response_ids"}
KEY_FIELDS = (pa.field("run_id", pa.string()), pa.field("step", pa.int32()), pa.field("row", pa.int32()))
LENGTH_FIELDS = (pa.field("num_prompt_tokens", pa.int32()), pa.field("num_response_tokens", pa.int32()))
ROW_VALUES = ("group_id", "reward", "advantages")  # that each token has, too


class TokenTexts:
    """Decodes tokens one by one. A token that is part of a character's bytes is a replacement character.

    Args:
        model: The model whose tokenizer is used.

    Raises:
        ModelError: The model's folder or tokenizer isn't there any more.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._decode = _decoder(model)
        self._known: dict[int, str] = {}

    def of(self, token_ids: pa.Array) -> pa.Array:
        """Return the text of each token: strings [T]."""
        unique, index = np.unique(token_ids.to_numpy(zero_copy_only=False), return_inverse=True)
        new = [token for token in unique.tolist() if token not in self._known]
        self._known |= zip(new, self._decode([[token] for token in new]), strict=True)
        texts = pa.array([self._known[token] for token in unique.tolist()], pa.string())
        return texts.take(pa.array(index))


def _decoder(model: ModelConfig) -> Callable[[list[list[int]]], list[str]]:
    file = Path(model.path) / "tokenizer.json"
    if file.is_file():
        tokenizer = Tokenizer.from_file(str(file))
        return lambda sequences: tokenizer.decode_batch(sequences, skip_special_tokens=False)
    from infra.models.load import load_tokenizer  # imports torch: seconds
    from rl_core.rollout.decoding import decode_texts

    return partial(decode_texts, load_tokenizer(model))


class KeptRun:
    """The steps of a run whose columns can be read, those before it was forked included.

    Args:
        directory: The run's.
        only: The step to open; None: all.
    """

    def __init__(self, directory: RunDirectory, only: int | None = None) -> None:
        self.directory, self.run_id = directory, directory.run_id
        self.batches: dict[int, BatchHandle] = {}  # by step
        self.missing: str | None = None  # why there are none
        try:
            self._store = open_run_columns(directory)
        except RunError as error:
            self.missing = str(error)
            return
        self.batches = _load_batches(self._store, self._store.steps() if only is None else [only])

    def batch(self, step: int) -> BatchHandle:
        """Return the batch of a step.

        Raises:
            RunError: The step is not kept; the message lists those that are.
        """
        if self.missing is not None:
            raise RunError(self.missing)
        return self.batches.get(step) or find_batch(self.directory, self._store, step)

    def checksums(self, step: int) -> dict[str, str]:
        """Return the checksum of each chunk of a step, by its key; they change with the step's columns."""
        return {record.ref.key: record.checksum for record in self._store.records(step)}

    def read(self, batch: BatchHandle, names: Collection[str]) -> dict[str, pa.Array]:
        """Return those of the named columns that a batch, or a selection of its rows, has."""
        stored = [name for name in batch.columns if name in names]
        columns = self._store.read(batch, stored) if stored else None
        return {name: columns[name] for name in stored} if columns is not None else {}

    @cached_property
    def texts(self) -> TokenTexts:
        """The texts of the tokens of the run's model."""
        return TokenTexts(self.directory.config().model)

    def fields(self, axis: Axis) -> dict[str, str]:
        """Return the dtypes of the columns of an axis that any step has; the widest where they differ."""
        found: dict[str, str] = {}
        for batch in self.batches.values():
            for group in batch.groups:
                for name, dtype in group.dtypes.items():
                    if column_spec(name).axis == axis:
                        found[name] = wider(name, found.get(name), dtype)
        return found

    def rows(self, step: int, fields: Collection[pa.Field]) -> pa.RecordBatch:
        """Return these fields of a step's rows: N rows."""
        batch = self.batches[step]
        found = self.read(batch, [field.name for field in fields])
        counts = {
            "num_prompt_tokens": lambda: self._lengths(batch, "prompt"),
            "num_response_tokens": lambda: self._lengths(batch, "response"),
        }
        made = {**self._key(step, batch.num_rows, lambda: np.arange(batch.num_rows)), **counts}
        return _assemble(fields, batch.num_rows, made, found)

    def tokens(self, step: int, axis: Axis, fields: Collection[pa.Field]) -> pa.RecordBatch:
        """Return these fields of the tokens of a step's prompts or responses, row by row: T rows."""
        batch, names = self.batches[step], {field.name for field in fields}
        wanted = {*names, *((IDS[axis],) if "text" in names else ())}
        if axis == "response" and "advantages" in names and TURN_COLUMNS[0] in batch.columns:
            wanted |= {*TURN_COLUMNS}
        found, lengths = self.read(batch, wanted), self._lengths(batch, axis)
        flat = {
            name: column.flatten() if column_spec(name).axis == axis else _repeat(column, lengths)
            for name, column in found.items()
            if name not in TURN_COLUMNS
        }
        if TURN_COLUMNS[0] in found:
            flat["advantages"] = pa.array(advantages_of_turns(*(found[name] for name in TURN_COLUMNS)))
        made = {
            **self._key(step, int(lengths.sum()), lambda: np.repeat(np.arange(len(lengths)), lengths)),
            "position": lambda: np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths),
            "text": lambda: self.texts.of(flat[IDS[axis]]),
        }
        return _assemble(fields, int(lengths.sum()), made, flat)

    def placements(self, step: int, fields: Collection[pa.Field]) -> pa.RecordBatch:
        """Return these fields of the places in the step's plan, in the plan's order: N rows for each epoch."""
        plan = self._store.owner(step).plans.load(step)
        places = np.concatenate([np.empty((4, 0), np.int64), *(_places(plan) if plan else ())], axis=1)
        made = dict(zip(("row", "update", "rank", "micro_batch"), places, strict=True))
        count = places.shape[1]
        key = self._key(step, count, lambda: made["row"])
        return _assemble(fields, count, key, {name: pa.array(values) for name, values in made.items()})

    def _lengths(self, batch: BatchHandle, axis: Axis) -> NDArray[np.int64]:
        return decode_ints(batch.prompt_lengths if axis == "prompt" else batch.response_lengths)

    def _key(self, step: int, count: int, rows: Callable[[], NDArray[np.int64]]) -> dict[str, Callable[[], object]]:
        return {
            "run_id": lambda: pa.repeat(self.run_id, count),
            "step": lambda: np.full(count, step, np.int32),
            "row": rows,
        }


def wider(name: str, one: str | None, other: str) -> str:
    """Return the dtype that holds the values of both."""
    order = column_spec(name).dtypes
    return other if one is None or one not in order or order.index(other) > order.index(one) else one


def field_of(name: str, dtype: str, *, is_flat: bool = False) -> pa.Field:
    """Return a column's field; with `is_flat`, that of a single token."""
    column_type = arrow_type(name, dtype)
    return pa.field(name, column_type.value_type if is_flat else column_type)


def _places(plan: StepPlan) -> Iterator[NDArray[np.int64]]:
    """Yield row, update, rank and micro-batch of each row of each update: [4, n]."""
    for number, update in enumerate(plan.updates):
        rows = np.asarray(update.rows, dtype=np.int64)
        micros = np.repeat(np.arange(len(update.micro_rows)), np.asarray(update.micro_rows))
        yield np.stack([rows, np.full_like(rows, number), *np.divmod(micros, update.num_micros)])


def _load_batches(store: RunColumns, steps: Collection[int]) -> dict[int, BatchHandle]:
    found = ((step, store.load_batch(step)) for step in steps)
    return {step: batch for step, batch in found if batch is not None}


def _repeat(column: pa.Array, lengths: NDArray[np.int64]) -> pa.Array:
    """Return each row's value once for each of its tokens."""
    return column.take(pa.array(np.repeat(np.arange(len(lengths)), lengths)))


def _assemble(
    fields: Collection[pa.Field],
    count: int,
    made: dict[str, Callable[[], object]],
    found: dict[str, pa.Array],
) -> pa.RecordBatch:
    """Return a record batch of these fields: what is made of the step, else what was read, else nulls."""
    arrays = []
    for field in fields:
        if field.name in made:
            value = made[field.name]()
            array = value if isinstance(value, pa.Array) else pa.array(value)
        else:
            array = found[field.name] if field.name in found else pa.nulls(count, field.type)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    if not arrays:  # only the number of rows is wanted
        return pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
