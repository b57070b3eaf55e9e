"""Load prompts from a file's rows: check them, apply the chat template, and reject or drop those too long."""

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from infra.datasets.environments import (
    EnvironmentOf,
    RowEnvironment,
    always,
    environments_of_sources,
    held_out_environment,
)
from infra.datasets.files import read_rows
from infra.datasets.prompts import LazyRow, PromptDataset, PromptRow
from infra.datasets.rows import ParsedRow, parse_row
from rl_core.rollout.chat import ChatTemplate, Shape, shape_of
from rl_core.rollout.control_tokens import Messages
from schemas.config.data import DataConfig, LevelCurriculum
from schemas.config.run import RunConfig
from schemas.errors import BrokenChatTemplateError, ChatTemplateError, DataError

logger = logging.getLogger(__name__)
_BATCH_ROWS = 1024  # that are tokenized at a time: what a tokenizer returns has 100 times the size of the ids


def level_of(place: str, info: Mapping[str, Any], levels: LevelCurriculum) -> int:
    """Return the number of the level, from 0, that a row belongs to.

    Args:
        place: Names the row in the error.
        info: The row's `extra_info`.
        levels: The levels, and the field that decides.

    Raises:
        DataError: The row has no such field, or it isn't a number, or one below all levels.
    """
    if levels.field not in info:
        raise DataError(
            f"{place}: extra_info has no {levels.field!r}, which data.curriculum.field names; it has {', '.join(info)}"
        )
    value = info[levels.field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= levels.starts[0]:
        raise DataError(
            f"{place}: extra_info.{levels.field} is {value!r:.80}; expected a number of at least {levels.starts[0]:g}, "
            "the smallest of data.curriculum.starts"
        )
    return bisect_right(levels.starts, value) - 1


def split_levels(path: str, prompts: PromptDataset, levels: LevelCurriculum) -> list[PromptDataset]:
    """Return the prompts of each level, in the file's order.

    Raises:
        DataError: A level has none.
    """
    rows = prompts.rows
    numbers = [level_of(path, row.info, levels) for row in rows]
    parts = []
    for level, name in enumerate(levels.names):
        own = [row for row, number in zip(rows, numbers, strict=True) if number == level]
        if not own:
            raise DataError(f"{path} has no rows of level {name}; change data.curriculum.starts, or add such rows")
        parts.append(PromptDataset(own, prompts.num_dropped if level == 0 else 0))
    return parts


def load_run_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, are_checked: bool = False
) -> tuple[PromptDataset, PromptDataset | None]:
    """Read a run's training prompts and, if it has any, held-out ones, each row with its environment.

    Args:
        config: The run.
        tokenizer: The tokenizer whose chat template formats the prompts.
        are_checked: Whether all prompts have been found usable before, see `load_prompts`.

    Raises:
        DataError: See `load_train_prompts`; or the environment of a held-out row isn't known.
        EnvironmentImportError: A tool can't be loaded, or lacks types or a description.
    """
    environments, path = environments_of_sources(config), config.data.eval_path
    prompts = load_train_prompts(config.data, tokenizer, environments, are_checked=are_checked)
    if path is None:
        return prompts, None
    environment_of = held_out_environment(path, prompts, environments)
    return prompts, load_prompts(path, config.data, tokenizer, environment_of, are_checked=are_checked)


def load_train_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    environments: Sequence[RowEnvironment] | None = None,
    *,
    are_checked: bool = False,
) -> PromptDataset:
    """Read training prompts: `data.train_path`, by level of difficulty if asked for, or `data.sources`.

    Args:
        config: The prompts.
        tokenizer: The tokenizer whose chat template formats the prompts.
        environments: Of each source; None: responses are one turn.
        are_checked: See `load_prompts`.

    Raises:
        DataError: See `load_prompts`; or a level of difficulty has no rows.
    """
    levels = config.curriculum if isinstance(config.curriculum, LevelCurriculum) else None
    environments = environments or [RowEnvironment()] * len(config.train_sources)
    parts = [
        load_prompts(source.path, config, tokenizer, always(environment), levels, are_checked=are_checked)
        for source, environment in zip(config.train_sources, environments, strict=True)
    ]
    if levels is not None:
        parts = split_levels(config.train_sources[0].path, parts[0], levels)
    return PromptDataset.mix(parts, config.source_weights)


def load_prompts(
    path: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    environment_of: EnvironmentOf = always(RowEnvironment()),  # noqa: B008  it is immutable
    levels: LevelCurriculum | None = None,
    *,
    are_checked: bool = False,
) -> PromptDataset:
    """Read prompts in verl's columns: `data_source`, `prompt`, `reward_model`, `extra_info`.

    Args:
        path: A file, a folder or a pattern, see `infra.datasets.files.data_files`.
        config: The most tokens of a prompt, what happens to longer ones, and the variables of the chat template.
        tokenizer: The tokenizer whose chat template formats the prompts.
        environment_of: Finds the environment of a row by its `data_source`.
        levels: The levels of difficulty of which each row must have one.
        are_checked: Whether all prompts have been found usable before. Unless longer ones are to be dropped, which only
            their tokens tell, a prompt is then tokenized when it is asked for.

    Raises:
        DataError: The file is missing or unreadable, or a row is unusable; the message names file, row (counted from 1)
            and column; or the chat template lacks a variable, see `ChatTemplate`, or leaves out a message.
    """
    parsed = [parse_row(f"{path}, row {number}", row) for number, row in enumerate(read_rows(path), start=1)]
    if not parsed:
        raise DataError(f"{path} has no rows; a run needs at least one prompt")
    if levels is not None:
        for number, row in enumerate(parsed, start=1):
            level_of(f"{path}, row {number}", row.info, levels)
    environments = [environment_of(row.info["data_source"]) for row in parsed]
    chats = {
        environment.number: ChatTemplate(tokenizer, config.chat_template_kwargs, environment.tools)
        for environment in {each.number: each for each in environments}.values()
    }
    if are_checked and config.overlong == "error":
        given = zip(parsed, environments, strict=True)
        return PromptDataset([_lazy_row(row, chats[environment.number], environment) for row, environment in given])
    prompt_ids = _tokenize(path, [row.messages for row in parsed], [chats[each.number] for each in environments])
    limit = config.max_prompt_tokens
    too_long = [number for number, ids in enumerate(prompt_ids, start=1) if len(ids) > limit]
    if too_long and config.overlong == "error":
        raise DataError(
            f"{path}, row {too_long[0]}: the prompt has {len(prompt_ids[too_long[0] - 1])} tokens, more than "
            f"data.max_prompt_tokens = {limit} ({len(too_long)} such rows); raise that, or set "
            'data.overlong = "drop" to drop such rows'
        )
    if len(too_long) == len(parsed):
        raise DataError(
            f"{path}: all {len(parsed)} prompts are longer than data.max_prompt_tokens = {limit}; raise that"
        )
    if too_long:
        logger.warning("%s: dropped %d of %d rows, longer than %d tokens", path, len(too_long), len(parsed), limit)
    rows = [
        _prompt_row(row, ids, environment)
        for row, ids, environment in zip(parsed, prompt_ids, environments, strict=True)
        if len(ids) <= limit
    ]
    return PromptDataset(rows, num_dropped=len(too_long))


def _lazy_row(row: ParsedRow, chat: ChatTemplate, environment: RowEnvironment) -> LazyRow:
    """Return a row that has been found usable, which is tokenized when it is asked for."""

    def encode() -> PromptRow:
        return _prompt_row(row, np.array(chat.encode(row.messages), dtype=np.int32), environment)

    return LazyRow(row.info, row.info["data_source"], environment.number, encode)


def _prompt_row(row: ParsedRow, prompt_ids: NDArray[np.int32], environment: RowEnvironment) -> PromptRow:
    return PromptRow(
        prompt_ids=prompt_ids,
        prompt_text="\n\n".join(message["content"] for message in row.messages),
        answer=row.answer,
        info=row.info,
        data_source=row.info["data_source"],
        messages=row.messages,
        environment=environment.number,
    )


def _render(path: str, prompts: list[Messages], chats: list[ChatTemplate]) -> list[str]:
    """Return each prompt under its chat template, in which all of its messages must be."""
    texts: list[str] = []
    shapes: set[tuple[int, Shape]] = set()  # what has been found to leave nothing out
    for number, (messages, chat) in enumerate(zip(prompts, chats, strict=True), start=1):
        try:
            texts.append(chat.render(messages))
            shape = id(chat), shape_of(messages)
            left_out = chat.find_left_out(shape[1]) if shape not in shapes else None
        except ChatTemplateError as error:
            is_broken = isinstance(error, BrokenChatTemplateError)
            advice = "correct its chat_template.jinja" if is_broken else "change the roles of the row's prompt"
            raise DataError(f"{path}, row {number}: {error}; {advice}") from error
        if left_out is not None:
            raise DataError(
                f"{path}, row {number}: {chat.name} leaves out {left_out.part} of prompt[{left_out.message}], of role "
                f"{messages[left_out.message]['role']!r}, so that the model would not read it; use roles that the "
                "template writes as plain text, or a model whose template does"
            )
        shapes.add(shape)
    _warn_of_changes(path, prompts, texts)
    return texts


def _warn_of_changes(path: str, prompts: list[Messages], texts: list[str]) -> None:
    """Warn of contents that templates don't write as they are, such as the reasoning of earlier turns."""
    changed = [
        (number, index)
        for number, (messages, text) in enumerate(zip(prompts, texts, strict=True), start=1)
        for index, message in enumerate(messages)
        if message["content"].strip() not in text
    ]
    if changed:
        number, index = changed[0]
        logger.warning(
            "%s, row %d: the model's chat template cuts or changes the content of prompt[%d], of role %r (%d such "
            "messages); if the model is to read all of it, write it so that the template keeps it",
            path,
            number,
            index,
            prompts[number - 1][index]["role"],
            len(changed),
        )


def _tokenize(path: str, prompts: list[Messages], chats: list[ChatTemplate]) -> list[NDArray[np.int32]]:
    """Return the token ids of each prompt under its chat template: int32 [P] each."""
    texts, prompt_ids = _render(path, prompts, chats), []
    for start in range(0, len(texts), _BATCH_ROWS):
        encoded = chats[0].tokenizer(texts[start : start + _BATCH_ROWS], add_special_tokens=False)
        prompt_ids += [np.array(token_ids, dtype=np.int32) for token_ids in encoded["input_ids"]]
    for number, (messages, ids, chat) in enumerate(zip(prompts, prompt_ids, chats, strict=True), start=1):
        if not len(ids):
            raise DataError(f"{path}, row {number}: the prompt has no tokens under the model's chat template")
        if name := chat.find_control_token(messages):
            try:
                prompt_ids[number - 1] = np.array(chat.encode(messages), dtype=np.int32)
            except ValueError as error:
                raise DataError(
                    f"{path}, row {number}: the prompt contains {name!r}, the name of a control token, which can't be "
                    f"encoded as text: {error}; remove it"
                ) from None
    return prompt_ids
