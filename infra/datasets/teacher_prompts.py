"""The prompts that teachers read in place of the policy's: with the answer, or what the environment answered."""

import json
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from infra.datasets.environments import environments_of_sources
from infra.datasets.prompts import PromptDataset, PromptRow
from rl_core.rollout.chat import ChatTemplate
from schemas.config.distillation import DistillationConfig, TeacherConfig
from schemas.config.run import RunConfig
from schemas.errors import ChatTemplateError, DataError

_MAX_CHATS = 256  # kept, with tools of programs, each of which is a chat template of its own


class TeacherPrompts:
    """Renders and encodes the prompt that the teacher of a row reads.

    Raises:
        EnvironmentImportError: A tool can't be loaded, or lacks types or a description.
    """

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        assert config.distillation is not None, "a run without teachers has no prompts of theirs"
        self._distillation: DistillationConfig = config.distillation
        self._chats = {
            environment.number: ChatTemplate(tokenizer, config.data.chat_template_kwargs, environment.tools)
            for environment in environments_of_sources(config)
        }
        self._chat = lru_cache(_MAX_CHATS)(self._make_chat)

    def encode(self, row: PromptRow, feedback: str = "") -> NDArray[np.int32]:
        """Return the token ids of what a row's teacher reads: int32 [P].

        Args:
            row: The row.
            feedback: What the environment answered to the response's last turn; its end is cut off if the prompt would
                be longer than the teacher's `max_prompt_tokens`.

        Raises:
            DataError: The row has no teacher, no user's message or not the template's fields, or its prompt is too long
                or can't be encoded.
        """
        name = self._distillation.teacher_of(row.data_source)
        if name is None:
            raise DataError(
                f"the data source {row.data_source!r} has no teacher; name it in data_sources of one of "
                "distillation.teachers, or leave that out of one of them, which then teaches all others"
            )
        teacher, place = self._distillation.teachers[name], f"distillation.teachers.{name}"
        if teacher.prompt is None:
            return np.asarray(row.prompt_ids, dtype=np.int32)
        while True:
            ids = self._encode(row, teacher.prompt, feedback, place)
            if len(ids) <= teacher.max_prompt_tokens:
                return ids
            if not (teacher.reads_feedback and feedback):
                raise _too_long(row, teacher, len(ids), place)
            feedback = feedback[: len(feedback) // 2]

    def longest(self, prompts: PromptDataset) -> dict[str, int]:
        """Return the tokens of the longest prompt that each teacher may read, by its name; see `encode` for errors."""
        found: dict[str, int] = {}
        for row in (prompts[number] for number in range(len(prompts))):
            num_tokens, name = len(self.encode(row)), self._distillation.teacher_of(row.data_source)
            assert name is not None
            found[name] = max(found.get(name, 0), num_tokens)
        teachers = self._distillation.teachers
        return {
            name: teachers[name].max_prompt_tokens if teachers[name].reads_feedback else num_tokens
            for name, num_tokens in found.items()
        }

    def _encode(self, row: PromptRow, template: str, feedback: str, place: str) -> NDArray[np.int32]:
        last = max((at for at, message in enumerate(row.messages) if message["role"] == "user"), default=None)
        if last is None:
            raise DataError(f"{place}.prompt: the prompt {row.prompt_text!r:.80} has no message of the user to replace")
        fields: Mapping[str, object] = {
            **row.info,
            "prompt": row.messages[last]["content"],
            "answer": row.answer,
            "feedback": feedback,
        }
        try:
            text = template.format(**fields)
        except KeyError as error:
            raise DataError(
                f"{place}.prompt has {{{error.args[0]}}}, which extra_info of the row {row.prompt_text!r:.80} lacks; "
                f"it has {', '.join(row.info)}"
            ) from None
        messages = [*row.messages[:last], {"role": "user", "content": text}, *row.messages[last + 1 :]]
        try:
            return np.array(self._chat(row.environment, row.tools).encode(messages), dtype=np.int32)
        except (ChatTemplateError, ValueError) as error:
            raise DataError(f"{place}.prompt: {error}") from error

    def _make_chat(self, environment: int | None, tools: str) -> ChatTemplate:
        """Return the template of an environment's chats, with the tools that its reset has added, in JSON."""
        own = self._chats[environment]
        return own.with_tools(json.loads(tools)) if tools else own


def open_teacher_prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> TeacherPrompts | None:
    """Return what makes the prompts of a run's teachers; None if they read those of the policy."""
    has_prompts = config.distillation is not None and config.distillation.has_prompts
    return TeacherPrompts(config, tokenizer) if has_prompts else None


def _too_long(row: PromptRow, teacher: TeacherConfig, num_tokens: int, place: str) -> DataError:
    return DataError(
        f"{place}.prompt: of the row {row.prompt_text!r:.80} it has {num_tokens} tokens, more than {place}."
        f"max_prompt_tokens = {teacher.max_prompt_tokens}; raise that, or drop the row"
    )
