"""Rows with given answers, for supervised fine-tuning: chats, prompts with completions, texts, and tokens.

A row's prompt is what comes before its first token with loss, its response what follows up to the last one. Encoded
rows are an Arrow file, which is mapped: a data set's size is not bounded by a process's memory.
"""

import json
import logging
import mmap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain, islice
from tempfile import TemporaryFile, gettempdir
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from infra.datasets.columns import MASK_COLUMN, SFT_COLUMNS, TOKENS, TOOLS_COLUMN, UNSUPPORTED_COLUMNS, sft_columns
from infra.datasets.files import read_rows
from infra.datasets.order import RowOrder
from infra.datasets.prompts import PromptDataset, PromptRow
from infra.datasets.rows import parse_messages, without_nulls
from infra.models.load import num_embeddings, stop_token_ids
from rl_core.columns.jagged import jagged, row_lengths, token_dtype
from rl_core.rollout.chat import ChatTemplate, LeftOut, Shape, shape_of
from rl_core.rollout.control_tokens import Messages
from schemas.config.run import RunConfig
from schemas.errors import ChatTemplateError, ConfigError, DataError, is_disk_full
from schemas.metrics import Metrics, Single

logger = logging.getLogger(__name__)

_MAX_CHATS, _MAX_SHAPES = 32, 1000  # kept, however many lists of tools and shapes of chats there are
_BATCH_ROWS = 1024  # of each record batch of a file of encoded rows but the last


@dataclass(frozen=True, kw_only=True)
class SftRow(PromptRow):
    """One row: its prompt, its response, and which tokens of the response have a loss, at least the first and last."""

    response_ids: np.ndarray  # int32 [R], R >= 1
    loss_mask: np.ndarray  # bool [R]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


def token_columns(rows: Sequence[SftRow], dtype: np.dtype[Any]) -> dict[str, pa.LargeListArray]:
    """Return rows as jagged columns: `prompt_ids` and `response_ids` of a dtype, and `loss_mask`. There may be none."""
    columns = {
        "prompt_ids": ([row.prompt_ids for row in rows], dtype),
        "response_ids": ([row.response_ids for row in rows], dtype),
        "loss_mask": ([row.loss_mask for row in rows], np.dtype(bool)),
    }
    return {
        name: jagged(
            np.concatenate([np.empty(0, kind), *values]).astype(kind), np.array(list(map(len, values)), np.int64)
        )
        for name, (values, kind) in columns.items()
    }


class SftDataset(PromptDataset):
    """The usable rows of one or several files, of which a row is made of its columns when it is asked for.

    Args:
        content: An Arrow file of `token_columns`, in batches of `_BATCH_ROWS` rows; mapped, as a rule.
        sizes: The number of rows of each file, in the order of their rows.
        weights: One positive number per file, see `RowOrder`.
        num_dropped: The number of rows dropped because they are too long.
    """

    def __init__(self, content: pa.Buffer, sizes: Sequence[int], weights: Sequence[float], num_dropped: int) -> None:
        super().__init__([], num_dropped)
        reader = pa.ipc.open_file(content)
        self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        self._order = RowOrder(sizes=tuple(sizes), weights=tuple(weights))
        self.content, self.sizes = content, tuple(sizes)

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: int) -> SftRow:
        batch, row = self._batches[index // _BATCH_ROWS], index % _BATCH_ROWS
        columns = (batch[name][row].values for name in ("prompt_ids", "response_ids", "loss_mask"))
        prompt, response, mask = (column.to_numpy(zero_copy_only=False) for column in columns)
        return _sft_row(prompt.astype(np.int32), response.astype(np.int32), mask)

    def __iter__(self) -> Iterator[SftRow]:
        return (self[index] for index in range(len(self)))

    def epoch_metrics(self, step: int, num_rows: int, names: Sequence[str]) -> Metrics:
        """Return the number of epochs up to the end of a step, of `num_rows` rows each: of several sources, of each.

        Args:
            step: The step, from 0.
            num_rows: The rows of a step.
            names: Those of the sources in metrics; of sources with the same name, the most epochs count.
        """
        taken = self._order.num_taken((step + 1) * num_rows)
        epochs = [count / size for count, size in zip(taken, self.sizes, strict=True)]
        own: Metrics = {}
        if len(epochs) > 1:
            by_size = sorted(zip(epochs, names, strict=True))
            own = {f"epoch/{name}": Single(value=value) for value, name in by_size}
        return {"epoch": Single(value=min(epochs)), **own}

    def steps_per_epoch(self, num_rows: int) -> list[float]:
        """Return after how many steps, of `num_rows` rows each, all rows of each source were taken: K."""
        return [prompts / num_rows for prompts in self._order.epoch_prompts()]

    @cached_property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """The tokens of each prompt: [N]."""
        return self._lengths("prompt_ids")

    @cached_property
    def response_lengths(self) -> NDArray[np.int64]:
        """The tokens of each response: [N]."""
        return self._lengths("response_ids")

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.prompt_lengths.max())

    @property
    def num_loss_tokens(self) -> int:
        """The tokens with loss of all rows."""
        return sum(pc.sum(batch["loss_mask"].flatten()).as_py() for batch in self._batches)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int((self.prompt_lengths + self.response_lengths).max())

    def _lengths(self, name: str) -> NDArray[np.int64]:
        return np.concatenate([row_lengths(batch[name]) for batch in self._batches])


def load_train_rows(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> SftDataset:
    """Read and encode the rows of a run's training data, of one source or several.

    Raises:
        DataError: See `encode_rows`.
    """
    sources = config.data.train_sources
    return encode_rows([source.path for source in sources], config.data.source_weights, config, tokenizer)


def load_rows(path: str, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> SftDataset:
    """Read and encode the rows at one path, see `encode_rows`."""
    return encode_rows([path], [1.0], config, tokenizer)


def encode_rows(
    paths: Sequence[str], weights: Sequence[float], config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> SftDataset:
    """Read and encode the rows at some paths. They are in a file without a name, which is gone with the process.

    Args:
        paths: A file, a folder or a pattern each, see `infra.datasets.files.data_files`.
        weights: One positive number per path.
        config: The run, with a section `sft`.
        tokenizer: The tokenizer, with the chat template if rows are chats.

    Raises:
        DataError: A file can't be read, or a row is unusable; the message names file, row (from 1) and column. Or the
            disk of the temporary files is full.
    """
    reader, dtype = _Reader(config, tokenizer), token_dtype(num_embeddings(config.model))
    rows = chain.from_iterable(map(reader.read, paths))
    try:
        content = _write_unnamed(rows, dtype)
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise DataError(
            f"the folder of temporary files, {gettempdir()}, has no space for the encoded rows of {', '.join(paths)}: "
            f"{error}; free some there, or set TMPDIR to another folder"
        ) from None
    logger.info("encoded %d rows of %s", sum(reader.sizes), ", ".join(paths))
    return SftDataset(content, reader.sizes, weights, reader.num_dropped)


def _write_unnamed(rows: Iterator[SftRow], dtype: np.dtype[Any]) -> pa.Buffer:
    """Write rows to an Arrow file without a name, see `SftDataset`, and map it."""
    with TemporaryFile() as file:
        with pa.ipc.new_file(file, pa.record_batch(token_columns([], dtype)).schema) as writer:
            while batch := [*islice(rows, _BATCH_ROWS)]:
                writer.write_batch(pa.record_batch(token_columns(batch, dtype)))
        file.flush()
        return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def check_rows(config: RunConfig, rows: SftDataset, held_out: SftDataset | None, num_positions: int) -> None:
    """Check that the longest row fits the model and a micro-batch.

    Raises:
        ConfigError: It doesn't.
    """
    longest = max(rows.longest, held_out.longest if held_out else 0)
    advice = 'lower sft.max_tokens with data.overlong = "drop"'
    if longest > num_positions:
        raise ConfigError(
            f"the longest row has {longest} tokens, more than the {num_positions} positions of the model "
            f"{config.model.path}; {advice}"
        )
    if longest > config.packing.token_budget:
        raise ConfigError(
            f"the longest row has {longest} tokens, more than packing.token_budget = {config.packing.token_budget}; "
            f"raise it to at least {longest}, or {advice}"
        )


class _Reader:
    """Reads and encodes files, and counts their rows.

    Attributes:
        sizes: The usable rows of each file that is read.
        num_dropped: Those that are too long, of all.
    """

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        assert config.sft is not None, "only supervised fine-tuning has rows with answers"
        self._encoder, self._limit = _Encoder(config, tokenizer), config.sft.max_tokens
        self._drops = config.data.overlong == "drop"
        self.sizes, self.num_dropped = list[int](), 0

    def read(self, path: str) -> Iterator[SftRow]:
        """Yield the usable rows at a path; see `encode_rows`."""
        num_rows, too_long, limit = 0, 0, self._limit
        for number, given in enumerate(read_rows(path, sft_columns), start=1):
            row = self._encoder.encode(f"{path}, row {number}", given)
            if row.num_tokens <= limit:
                num_rows += 1
                yield row
            elif self._drops:
                too_long += 1
            else:
                raise DataError(
                    f"{path}, row {number}: it has {row.num_tokens} tokens, more than sft.max_tokens = {limit}; raise "
                    'that, or set data.overlong = "drop" to drop such rows'
                )
        if not num_rows:
            advice = f" of at most sft.max_tokens = {limit}; raise that" * bool(too_long)
            raise DataError(f"{path} has no rows{advice}")
        if too_long:
            logger.warning(
                "%s: dropped %d of %d rows, longer than %d tokens", path, too_long, too_long + num_rows, limit
            )
        self.sizes.append(num_rows)
        self.num_dropped += too_long


class _Encoder:
    """Encodes rows."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        assert config.sft is not None
        self._config, self._tokenizer, self._loss_on = config, tokenizer, config.sft.loss_on
        self._tools = [dict(tool) for tool in config.sft.tools]
        self._ends, self._num_ids = stop_token_ids(config.model, tokenizer), num_embeddings(config.model)
        self._open_chat = lru_cache(_MAX_CHATS)(self._make_chat)

    def encode(self, place: str, row: dict[str, Any]) -> SftRow:
        """Return a row as tokens; `place` names it in errors."""
        for name, advice in UNSUPPORTED_COLUMNS.items():
            if name != TOOLS_COLUMN and row.get(name) not in (None, "", [], {}):
                raise DataError(f"{place}: the column {name!r} can't be part of the row: {advice}")
        kind = next((kind for kind in SFT_COLUMNS if all(row.get(name) is not None for name in kind)), ())
        if not kind:
            sft_columns(place, [name for name, value in row.items() if value is not None])  # raises
        values, given = [row[name] for name in kind], row.get(TOOLS_COLUMN)
        own = None if given in (None, "") else _parse_tools(place, given)
        if kind == TOKENS:
            ids, spans = self._join_tokens(place, values[0], values[1], row.get(MASK_COLUMN))
        elif kind == ("text",) or (len(kind) > 1 and all(isinstance(value, str) for value in values)):
            if own:
                raise DataError(f"{place}: a text has no place for its tools; write them into it, or give a chat")
            ids, spans = self._encode_texts(place, kind, *values)
        else:
            chats = [_parse_chat(place, name, value) for name, value in zip(kind, values, strict=True)]
            num_given = len(chats[0]) if len(chats) > 1 else 0
            tools = self._tools if own is None else own
            ids, spans = self._encode_chat(place, list(chain(*chats)), num_given, tools)
        spans = spans[-1:] if self._loss_on == "last_turn" else spans
        mask = np.zeros(len(ids), dtype=bool)
        for span in [range(len(ids))] if self._loss_on == "all" else spans:
            mask[span.start : span.stop] = True
        mask[:1] = False  # nothing predicts it
        if not mask.any():
            raise DataError(f"{place}: none of its tokens has a loss; give it an answer, or remove it")
        first, last = (int(at) for at in np.flatnonzero(mask)[[0, -1]])
        tokens = np.array(ids, dtype=np.int32)
        return _sft_row(tokens[:first], tokens[first : last + 1], mask[first : last + 1])

    def _join_tokens(self, place: str, prompt: Any, response: Any, mask: Any) -> tuple[list[int], list[range]]:
        """Return the tokens of prompt and response as they are, and where those with loss are."""
        for name, ids in zip(TOKENS, (prompt, response), strict=True):
            if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < self._num_ids for each in ids):
                raise DataError(
                    f"{place}: {name} is {ids!r:.80}; expected a list of token ids of {self._config.model.path}, below "
                    f"{self._num_ids}"
                )
        mask = [True] * len(response) if mask is None else mask
        if not isinstance(mask, list) or len(mask) != len(response) or not {*map(type, mask)} <= {bool}:
            raise DataError(
                f"{place}: {MASK_COLUMN} is {mask!r:.80}; expected true or false for each of the {len(response)} "
                f"tokens of {TOKENS[1]}"
            )
        edges = len(prompt) + np.flatnonzero(np.diff([False, *mask, False]))
        return [*prompt, *response], [range(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]

    def _encode_texts(self, place: str, kind: Collection[str], *texts: Any) -> tuple[list[int], list[range]]:
        """Encode a text, or a prompt and its completion, as texts without a chat template, and end them."""
        for name, text in zip(kind, texts, strict=True):
            if not isinstance(text, str):
                raise DataError(f"{place}: {name} is {text!r:.80}; expected a text")
        prompt, completion = texts if len(texts) > 1 else ("", *texts)
        before, ids = self._encode_text(prompt) if prompt else [], self._encode_text(prompt + completion)
        if ids[: len(before)] != before:  # the model continues the prompt's own tokens
            ids = before + self._tokenizer(completion, add_special_tokens=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        ids = ids if ids[-1:] == [end] else [*ids, end]
        return ids, [range(len(before), len(ids))]

    def _encode_text(self, text: str) -> list[int]:
        """Encode a text with what the tokenizer begins texts with, but without an end."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        eos = self._tokenizer.eos_token
        return ids[:-1] if ids[-1:] == [self._tokenizer.eos_token_id] and not text.endswith(eos) else ids

    def _encode_chat(
        self, place: str, messages: Messages, num_given: int, tools: list[dict[str, Any]]
    ) -> tuple[list[int], list[range]]:
        """Encode a chat, of whose turns those in the first `num_given` messages are a prompt's."""
        is_answer = [message["role"] == "assistant" for message in messages]
        if not any(is_answer[num_given:]):
            raise DataError(f"{place}: no message of role 'assistant' to train on; add one, or remove the row")
        advice = "change the row, or give the model's chat_template.jinja {% generation %} marks"
        try:
            chat, find_left_out = self._open_chat(json.dumps(tools))
            if (left_out := find_left_out(shape_of(messages))) is not None:
                advice = "write it into a message's content, as the model does, or use a template that writes it"
                raise ChatTemplateError(
                    f"{chat.name} leaves out {left_out.part} of message {left_out.message}, of role "
                    f"{messages[left_out.message]['role']!r}"
                )
            if self._loss_on == "all":
                return chat.encode(messages, with_prompt=False), []
            ids, spans = chat.encode_turns(messages, self._ends)
        except DataError as error:  # of the template with these tools, which says what to do
            raise DataError(f"{place}: {error}") from error
        except (ChatTemplateError, ValueError) as error:
            raise DataError(f"{place}: {error}; {advice}") from error
        return ids, spans[sum(is_answer[:num_given]) :]

    def _make_chat(self, tools_json: str) -> tuple[ChatTemplate, Callable[[Shape], LeftOut | None]]:
        """Return the chat template with some tools, and what it leaves out of chats of a shape."""
        chat = ChatTemplate(self._tokenizer, self._config.data.chat_template_kwargs, json.loads(tools_json))
        return chat, lru_cache(_MAX_SHAPES)(partial(chat.find_left_out, with_prompt=False))


def _sft_row(prompt_ids: NDArray[np.int32], response_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> SftRow:
    return SftRow(
        prompt_ids=prompt_ids,
        prompt_text="",
        answer="",
        info={},
        data_source="",
        response_ids=response_ids,
        loss_mask=loss_mask,
    )


def _parse_chat(place: str, name: str, value: Any) -> Messages:
    if name == "completion" and isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    return parse_messages(place, value, name, whole_turns=True)


def _parse_tools(place: str, value: Any) -> list[dict[str, Any]]:
    """Return the JSON schemas of a chat's tools: a list, or the JSON text of one."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        tools = value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{place}: {TOOLS_COLUMN} is {value!r:.80}; expected a list of JSON schemas, or its JSON text")
    return [without_nulls(tool) for tool in tools]
