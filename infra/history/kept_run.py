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
ROW_VALUES = ("group_id", "reward", "advantages")  # that each token has, too


class TokenTexts:
    """Decodes tokens one by one. A token that is part of a character's bytes is a replacement character.

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
    from rl_core.rollout.chat import decode_texts

    return partial(decode_texts, load_tokenizer(model))


class KeptRun:
    """The steps of a run whose columns can be read, those before it was forked included.

    Args:
        directory: The run's.
        only: The step to open; None: all from `first` on.
        first: The first step to open.
    """

    def __init__(self, directory: RunDirectory, only: int | None = None, first: int = 0) -> None:
        self.directory, self.run_id = directory, directory.run_id
        self.batches: dict[int, BatchHandle] = {}  # by step
        self.missing: str | None = None  # why there are none
        try:
            self._store = open_run_columns(directory)
        except RunError as error:
            self.missing = str(error)
            return
        steps = [step for step in self._store.steps() if step >= first] if only is None else [only]
        self.batches = _load_batches(self._store, steps)

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

    def column(self, step: int, name: str) -> pa.Array | None:
        """Return a column of a step: N rows; None if the step doesn't have it."""
        return self.read(self.batches[step], [name]).get(name)

    def tokens(self, step: int, axis: Axis, name: str) -> pa.Array | None:
        """Return a value of each token of a step's prompts or responses: N lists; None if the step doesn't have it.

        Args:
            step: The step.
            axis: `prompt` or `response`.
            name: A column of the axis; `text`; or `advantages`, those of the token's turn or row.
        """
        batch = self.batches[step]
        lengths = decode_ints(batch.prompt_lengths if axis == "prompt" else batch.response_lengths)
        if name == "text":
            ids = self.column(step, IDS[axis])
            flat = None if ids is None else self.texts.of(ids.flatten())
        elif name == "advantages" and TURN_COLUMNS[0] in batch.columns:
            turns = self.read(batch, TURN_COLUMNS)
            flat = pa.array(advantages_of_turns(*(turns[each] for each in TURN_COLUMNS)))
        elif name == "advantages":
            values = self.column(step, name)
            flat = None if values is None else values.take(pa.array(np.repeat(np.arange(len(lengths)), lengths)))
        else:
            return self.column(step, name)
        return None if flat is None else pa.LargeListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]), flat)

    def places(self, step: int) -> pa.Array | None:
        """Return where the step's plan trains each row: N lists, of an `update`, `rank` and `micro_batch` each."""
        if (plan := self._store.owner(step).plans.load(step)) is None:
            return None
        places = np.concatenate([np.empty((4, 0), np.int64), *_places(plan)], axis=1)
        rows, *values = places[:, np.argsort(places[0], kind="stable")]
        offsets = np.searchsorted(rows, np.arange(self.batches[step].num_rows + 1)).astype(np.int32)
        return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(values, ["update", "rank", "micro_batch"]))


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


def ranges(numbers: list[int]) -> list[str]:
    """Return ascending numbers as ranges.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        ['0 to 2', '5', '7 to 8']
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return [" to ".join(map(str, each)) for each in found]
