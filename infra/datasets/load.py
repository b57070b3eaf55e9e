"""Load prompts from a file's rows: check them, apply the chat template, and reject or drop those too long."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from infra.datasets.environments import (
    EnvironmentOf,
    RowEnvironment,
    always,
    environments_of_sources,
    held_out_environment,
)
from infra.datasets.files import REQUIRED_COLUMNS, read_rows
from infra.datasets.levels import level_of, split_levels
from infra.datasets.prompts import PromptDataset, PromptRow
from rl_core.rollout.chat import ChatTemplate
from rl_core.rollout.control_tokens import Messages
from schemas.config.curriculum import LevelCurriculum
from schemas.config.data import DataConfig
from schemas.config.run import RunConfig
from schemas.errors import ChatTemplateError, DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ParsedRow:
    """A well-formed row that is not tokenized yet."""

    messages: Messages
    answer: str
    info: dict[str, Any]

    def with_ids(self, token_ids: list[int], environment: int | None) -> PromptRow:
        return PromptRow(
            prompt_ids=np.array(token_ids, dtype=np.int32),
            prompt_text="\n\n".join(message["content"] for message in self.messages),
            answer=self.answer,
            info=self.info,
            data_source=self.info["data_source"],
            messages=self.messages,
            environment=environment,
        )


def load_run_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PromptDataset, PromptDataset | None]:
    """Read a run's training prompts and, if it has any, held-out ones, each row with its environment.

    Raises:
        DataError: See `load_train_prompts`; or the environment of a held-out row isn't known.
        EnvironmentImportError: A tool can't be loaded, or lacks types or a description.
    """
    environments, path = environments_of_sources(config), config.data.eval_path
    prompts = load_train_prompts(config.data, tokenizer, environments)
    if path is None:
        return prompts, None
    environment_of = held_out_environment(path, prompts, environments)
    return prompts, load_prompts(path, config.data, tokenizer, environment_of)


def load_train_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, environments: Sequence[RowEnvironment] | None = None
) -> PromptDataset:
    """Read training prompts: `data.train_path`, by level of difficulty if asked for, or `data.sources`.

    Args:
        config: The prompts.
        tokenizer: The tokenizer whose chat template formats the prompts.
        environments: Of each source; None: responses are one turn.

    Raises:
        DataError: See `load_prompts`; or a level of difficulty has no rows.
    """
    levels = config.curriculum if isinstance(config.curriculum, LevelCurriculum) else None
    environments = environments or [RowEnvironment()] * len(config.train_sources)
    parts = [
        load_prompts(source.path, config, tokenizer, always(environment), levels)
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
) -> PromptDataset:
    """Read one file or folder in verl's columns: `data_source`, `prompt`, `reward_model`, `extra_info`.

    Args:
        path: A path that `infra.datasets.files.read_rows` accepts: Parquet, JSONL, or a folder of `save_to_disk`.
        config: The most tokens of a prompt, what happens to longer ones, and the variables of the chat template.
        tokenizer: The tokenizer whose chat template formats the prompts.
        environment_of: Finds the environment of a row by its `data_source`.
        levels: The levels of difficulty of which each row must have one.

    Raises:
        DataError: The file is missing or unreadable, or a row is unusable; the message names file, row (counted from 1)
            and column; or the chat template lacks a variable, see `ChatTemplate`.
    """
    parsed = [_parse_row(f"{path}, row {number}", row) for number, row in enumerate(read_rows(path), start=1)]
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
    token_ids = _tokenize(path, [row.messages for row in parsed], [chats[each.number] for each in environments])
    limit = config.max_prompt_tokens
    too_long = [number for number, ids in enumerate(token_ids, start=1) if len(ids) > limit]
    if too_long and config.overlong == "error":
        raise DataError(
            f"{path}, row {too_long[0]}: the prompt has {len(token_ids[too_long[0] - 1])} tokens, more than "
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
        row.with_ids(ids, environment.number)
        for row, ids, environment in zip(parsed, token_ids, environments, strict=True)
        if len(ids) <= limit
    ]
    return PromptDataset(rows, num_dropped=len(too_long))


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
        raise DataError(f"{place}: reward_model.ground_truth is missing or null; expected the answer as a string")
    extra = row.get("extra_info") or {}
    if not isinstance(extra, dict):
        raise DataError(f"{place}: extra_info is {type(extra).__name__}; expected an object, or null")
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
            raise DataError(f"{place}: prompt[{index}] is {message!r:.80}; expected strings for role and content")
    if not any(message["content"].strip() for message in prompt):
        raise DataError(f"{place}: the prompt is empty; give at least one message with content, or remove the row")
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _tokenize(path: str, prompts: list[Messages], chats: list[ChatTemplate]) -> list[list[int]]:
    """Return the token ids of each prompt under its chat template; tokenizes all prompts in one call."""
    texts: list[str] = []
    for number, (messages, chat) in enumerate(zip(prompts, chats, strict=True), start=1):
        try:
            texts.append(chat.render(messages))
        except ChatTemplateError as error:
            raise DataError(f"{path}, row {number}: {error}; change the roles of the row's prompt") from error
    token_ids: list[list[int]] = chats[0].tokenizer(texts, add_special_tokens=False)["input_ids"]
    for number, (messages, ids, chat) in enumerate(zip(prompts, token_ids, chats, strict=True), start=1):
        if not ids:
            raise DataError(f"{path}, row {number}: the prompt has no tokens under the model's chat template")
        if name := chat.find_control_token(messages):
            try:
                token_ids[number - 1] = chat.encode(messages)
            except ValueError as error:
                raise DataError(
                    f"{path}, row {number}: the prompt contains {name!r}, the name of a control token, which can't be "
                    f"encoded as text: {error}; remove it"
                ) from None
    return token_ids
