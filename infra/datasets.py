"""Prompt files in verl's columns, and the order in which steps take their rows."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from infra.engines.noise import derive_seed
from schemas.config.data import DataConfig
from schemas.errors import DataError

logger = logging.getLogger(__name__)

Messages = list[dict[str, str]]

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")


@dataclass(frozen=True)
class PromptRow:
    """One prompt, ready to generate from and to score against."""

    prompt_ids: np.ndarray  # int32 [P], P >= 1: the chat template applied, with the generation prompt
    prompt_text: str  # the messages' contents, a blank line between them
    answer: str
    info: dict[str, Any]  # `extra_info` and `data_source`
    data_source: str


@dataclass(frozen=True)
class _ParsedRow:
    """A row that is well formed and not tokenized yet."""

    messages: Messages
    answer: str
    info: dict[str, Any]

    def with_ids(self, token_ids: list[int]) -> PromptRow:
        return PromptRow(
            prompt_ids=np.array(token_ids, dtype=np.int32),
            prompt_text="\n\n".join(message["content"] for message in self.messages),
            answer=self.answer,
            info=self.info,
            data_source=self.info["data_source"],
        )


class PromptDataset:
    """The usable rows of one prompt file, in the file's order.

    Attributes:
        num_dropped: Rows left out because their prompt is too long.
    """

    def __init__(self, rows: list[PromptRow], num_dropped: int = 0) -> None:
        self._rows = rows
        self.num_dropped = num_dropped

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self._rows[index]

    @property
    def max_prompt_tokens(self) -> int:
        """The length of the longest prompt."""
        return max(len(row.prompt_ids) for row in self._rows)

    def rows_for_step(self, step: int, num_prompts: int, seed: int, shuffle: bool) -> np.ndarray:
        """Return the row indices that `step` (from 0) takes: int64 [num_prompts].

        Epochs, each a permutation of all rows seeded by (seed, epoch), follow one another without end; step k
        takes the k-th window of `num_prompts`. A window may span epochs, so a file with fewer rows repeats
        them. Nothing but the arguments counts: a resumed run needs no cursor.
        """
        positions = np.arange(step * num_prompts, (step + 1) * num_prompts, dtype=np.int64)
        epochs, within = np.divmod(positions, len(self))
        if not shuffle:
            return within
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs):
            order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(self))
            rows[epochs == epoch] = order[within[epochs == epoch]]
        return rows

    def rows_for_groups(
        self, step: int, groups: Sequence[int], num_prompts: int, seed: int, shuffle: bool
    ) -> np.ndarray:
        """Return the row index of each of the step's `groups`, which are numbered from 0: int64 [G].

        The groups below `num_prompts` take the step's own rows, see `rows_for_step`; those from there on are
        further ones, and move no cursor. Without shuffling they go on in the file. With it, they take
        permutations of all rows, one after the other, seeded by (seed, step) and with the step's own rows last:
        no row comes twice in a step while there are others.
        """
        numbers = np.asarray(groups, dtype=np.int64)
        if not shuffle:
            return (step * num_prompts + numbers) % len(self)
        own = self.rows_for_step(step, num_prompts, seed, shuffle)
        num_further = max(0, numbers.max(initial=-1) + 1 - num_prompts)
        further = [self._further_rows(step, epoch, own, seed) for epoch in range(-(-num_further // len(self)))]
        return np.concatenate([own, *further])[numbers]

    def _further_rows(self, step: int, epoch: int, own: np.ndarray, seed: int) -> np.ndarray:
        order = np.random.Generator(np.random.PCG64(derive_seed(seed, "further", step, epoch))).permutation(len(self))
        return order[np.argsort(np.isin(order, own), kind="stable")]


def load_prompts(path: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
    """Read a Parquet or JSONL file in verl's columns: `data_source`, `prompt`, `reward_model`, `extra_info`.

    Args:
        path: The file; `.parquet`, or `.jsonl` or `.json` with one object per line.
        config: How long prompts may be, and what happens to longer ones.
        tokenizer: Its chat template makes the prompts.

    Raises:
        DataError: The file is missing or unreadable, or a row is unusable; the message names file, row
            (from 1) and column.
    """
    parsed = [_parse_row(f"{path}, row {number}", row) for number, row in enumerate(_read(path), start=1)]
    if not parsed:
        raise DataError(f"{path} has no rows; a run needs at least one prompt")
    token_ids = _tokenize(path, [row.messages for row in parsed], tokenizer)
    limit = config.max_prompt_tokens
    too_long = [number for number, ids in enumerate(token_ids, start=1) if len(ids) > limit]
    if too_long and config.overlong == "error":
        raise DataError(
            f"{path}, row {too_long[0]}: the prompt has {len(token_ids[too_long[0] - 1])} tokens, more than "
            f"data.max_prompt_tokens = {limit} ({len(too_long)} such rows); raise that, or set "
            'data.overlong = "drop" to leave such rows out'
        )
    if len(too_long) == len(parsed):
        raise DataError(
            f"{path}: all {len(parsed)} prompts are longer than data.max_prompt_tokens = {limit}; raise that"
        )
    if too_long:
        logger.warning("%s: dropped %d of %d rows, longer than %d tokens", path, len(too_long), len(parsed), limit)
    rows = [row.with_ids(ids) for row, ids in zip(parsed, token_ids, strict=True) if len(ids) <= limit]
    return PromptDataset(rows, num_dropped=len(too_long))


def _read(path: str) -> Iterator[dict[str, Any]]:
    """Yield the file's rows as plain Python values."""
    if not Path(path).is_file():
        raise DataError(f"{path}: there is no such file; check data.train_path and data.eval_path")
    if Path(path).suffix in (".jsonl", ".json"):
        return _read_jsonl(path)
    if Path(path).suffix != ".parquet":
        raise DataError(f"{path}: unknown kind of data file; give a .parquet or a .jsonl file")
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} can't be read as Parquet: {str(error).splitlines()[0]}") from error
    missing = [name for name in REQUIRED_COLUMNS if name not in table.column_names]
    if missing:
        raise DataError(
            f"{path}: no column {missing[0]!r}; it has {', '.join(table.column_names)}, "
            f"and needs {', '.join(REQUIRED_COLUMNS)}"
        )
    return (row for batch in table.to_batches() for row in batch.to_pylist())


def _read_jsonl(path: str) -> Iterator[dict[str, Any]]:
    # Not pyarrow's reader: it wants one schema for all rows, fills gaps with nulls, and names no bad line.
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    raise DataError(f"{path}, row {number}: the line is blank; remove it")
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(f"{path}, row {number}: expected a JSON object, found {type(row).__name__}")
                yield row
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, row {number}: not JSON: {error}; write one JSON object per line") from error
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path} can't be read as UTF-8 text: {error}") from error


def _parse_row(place: str, row: dict[str, Any]) -> _ParsedRow:
    for name in REQUIRED_COLUMNS:
        if row.get(name) is None:
            raise DataError(
                f"{place}: column {name!r} is missing or null; every row needs {', '.join(REQUIRED_COLUMNS)}"
            )
    source = row["data_source"]
    if not isinstance(source, str) or not source:
        raise DataError(f"{place}: data_source is {source!r}; expected a non-empty string")
    reward_model = row["reward_model"]
    answer = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if answer is None:
        raise DataError(f"{place}: reward_model.ground_truth is missing or null; expected the answer as text")
    extra = row.get("extra_info") or {}
    if not isinstance(extra, dict):
        raise DataError(f"{place}: extra_info is {type(extra).__name__}; expected an object or nothing")
    return _ParsedRow(
        messages=_parse_messages(place, row["prompt"]),
        answer=answer if isinstance(answer, str) else json.dumps(answer, default=str),
        info={**extra, "data_source": source},
    )


def _parse_messages(place: str, prompt: Any) -> Messages:
    if not isinstance(prompt, list):
        raise DataError(
            f"{place}: prompt is {type(prompt).__name__}; expected a chat list, e.g. "
            '[{"role": "user", "content": "..."}]'
        )
    for index, message in enumerate(prompt):
        well_formed = isinstance(message, dict) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not well_formed:
            raise DataError(f"{place}: prompt[{index}] is {message!r:.80}; expected text under role and content")
    if not any(message["content"].strip() for message in prompt):
        raise DataError(f"{place}: the prompt is empty; give at least one message with content, or remove the row")
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _tokenize(path: str, prompts: list[Messages], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of each prompt under the chat template, all tokenized in one call."""
    texts: list[str] = []
    for number, messages in enumerate(prompts, start=1):
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            texts.append(str(text))
        except TemplateError as error:
            raise DataError(f"{path}, row {number}: the model's chat template refuses the prompt: {error}") from error
    token_ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for number, ids in enumerate(token_ids, start=1):
        if not ids:
            raise DataError(f"{path}, row {number}: the prompt has no tokens under the model's chat template")
    return token_ids
