"""Rows with given answers, for supervised fine-tuning: chats, prompts with completions, texts, and tokens.

A row's prompt is what comes before its first token with loss, its response what follows up to the last one.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from infra.datasets.columns import (
    MASK_COLUMN,
    SFT_COLUMNS,
    TOKENS,
    TOOLS_COLUMN,
    UNSUPPORTED_COLUMNS,
    sft_columns,
)
from infra.datasets.files import read_rows
from infra.datasets.prompts import PromptDataset, PromptRow
from infra.datasets.rows import parse_messages, without_nulls
from infra.models.load import num_embeddings, stop_token_ids
from rl_core.rollout.chat import ChatTemplate, LeftOut, Shape, shape_of
from rl_core.rollout.control_tokens import Messages
from schemas.config.run import RunConfig
from schemas.errors import ChatTemplateError, ConfigError, DataError
from schemas.metrics import Metrics, Single

logger = logging.getLogger(__name__)

_MAX_CHATS, _MAX_SHAPES = 32, 1000  # kept, however many lists of tools and shapes of chats there are


@dataclass(frozen=True, kw_only=True)
class SftRow(PromptRow):
    """One row: its prompt, its response, and which tokens of the response have a loss, at least the first and last."""

    response_ids: np.ndarray  # int32 [R], R >= 1
    loss_mask: np.ndarray  # bool [R]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


class SftDataset(PromptDataset):
    """The usable rows of one or several files."""

    def __getitem__(self, index: int) -> SftRow:
        row = super().__getitem__(index)
        assert isinstance(row, SftRow), "a data set for supervised fine-tuning has rows with answers"
        return row

    def __iter__(self) -> Iterator[SftRow]:
        return (self[index] for index in range(len(self)))

    def epoch_metrics(self, step: int, num_rows: int) -> Metrics:
        """Return the number of epochs up to the end of a step, of `num_rows` rows each."""
        return {"epoch": Single(value=(step + 1) * num_rows / len(self))}

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(row.num_tokens for row in self)


def load_train_rows(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> SftDataset:
    """Read the rows of a run's training data, of one source or several.

    Raises:
        DataError: See `load_rows`.
    """
    sources = config.data.train_sources
    parts = [load_rows(source.path, config, tokenizer) for source in sources]
    return SftDataset.mix(parts, [source.weight for source in sources])


def load_rows(path: str, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> SftDataset:
    """Read and encode the rows at a path.

    Args:
        path: A file, a folder or a pattern, see `infra.datasets.files.data_files`.
        config: The run, with a section `sft`.
        tokenizer: The tokenizer, with the chat template if the rows are chats.

    Raises:
        DataError: The file can't be read, or a row is unusable; the message names file, row (from 1) and column.
    """
    assert config.sft is not None, "only supervised fine-tuning has rows with answers"
    encoder, limit = _Encoder(config, tokenizer), config.sft.max_tokens
    rows, too_long = list[PromptRow](), 0
    for number, given in enumerate(read_rows(path, sft_columns), start=1):
        row = encoder.encode(f"{path}, row {number}", given)
        if row.num_tokens <= limit:
            rows.append(row)
        elif config.data.overlong == "drop":
            too_long += 1
        else:
            raise DataError(
                f"{path}, row {number}: it has {row.num_tokens} tokens, more than sft.max_tokens = {limit}; raise "
                'that, or set data.overlong = "drop" to drop such rows'
            )
    if not rows:
        raise DataError(f"{path} has no rows" + (f" of at most sft.max_tokens = {limit}; raise that" * bool(too_long)))
    if too_long:
        logger.warning("%s: dropped %d of %d rows, longer than %d tokens", path, too_long, too_long + len(rows), limit)
    return SftDataset(rows, num_dropped=too_long)


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


class _Encoder:
    """Encodes rows.

    Args:
        config: The run.
        tokenizer: The tokenizer.
    """

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
        return SftRow(
            prompt_ids=tokens[:first],
            prompt_text="",
            answer="",
            info={},
            data_source="",
            response_ids=tokens[first : last + 1],
            loss_mask=mask[first : last + 1],
        )

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


def _parse_chat(place: str, name: str, value: Any) -> Messages:
    if name == "completion" and isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    return parse_messages(place, value, name, with_calls=True)


def _parse_tools(place: str, value: Any) -> list[dict[str, Any]]:
    """Return the JSON schemas of a chat's tools: a list, or the JSON text of one."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        tools = value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{place}: {TOOLS_COLUMN} is {value!r:.80}; expected a list of JSON schemas, or its JSON text")
    return [without_nulls(tool) for tool in tools]
