"""The tokens between two turns of the model: what the chat template writes for an environment's messages.

A trajectory's tokens are append-only: what was sampled is never decoded and encoded again. So the tokens between turns
are those that the template writes after a turn of a stub of a chat, and it must write the same ones after any turn.

A dialogue adds the limits and the chat template of one environment's rows.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from infra.datasets import PromptRow
from infra.environments.slot import Reply
from rl_core.rollout.chat import ChatTemplate
from rl_core.rollout.control_tokens import Messages
from schemas.config.environment import EnvironmentConfig, ProgramEnvironment, ToolsEnvironment
from schemas.errors import ChatTemplateError

logger = logging.getLogger(__name__)

MAX_CHATS = 256  # with tools of a program, each of which is a chat template of its own

# Nothing before a turn has these texts, by which it is found in what a template writes.
_ANSWER, _SECOND_ANSWER, _REASONING = "answer qzj", "second qzj", "because qzj"
_STUB: Messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
_TEXTS = ("observation", " ", "\n3 < 4\n", "é", "two\nlines")  # as which observations are tried out
_REASONING_MARKS = (
    ("<think>\n", "\n</think>\n\n"),
    ("<|channel>thought\n", "\n<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)


class EnvironmentTokens:
    """Encodes an environment's messages, from the end of one turn of the model to the beginning of the next.

    Args:
        chat: The chat template.
        role: The role of the messages.
        drops_reasoning: Whether a template that would drop earlier turns' reasoning is accepted.
        several: Whether the environment may answer a turn with several messages, whatever it is.

    Raises:
        ChatTemplateError: The template rejects such messages or leaves them out, or what it writes depends on the turns
            before them.
    """

    def __init__(self, chat: ChatTemplate, role: str, *, drops_reasoning: bool = False, several: bool = False) -> None:
        self._chat, self._role = chat, role
        self._heads: dict[str, list[int]] = {}  # the tokens of what was written up to a turn's end, usually of one text
        for texts in [*((text,) for text in _TEXTS), *([_TEXTS] if several else ())]:
            self._check(texts)
        if not drops_reasoning and self._drops_reasoning():
            raise ChatTemplateError(
                f"{chat.name} drops the reasoning of earlier turns, but a trajectory keeps what was sampled; set "
                "environment.drops_reasoning = true to train and evaluate with reasoning kept"
            )

    def encode(self, observations: Sequence[str], last: int) -> np.ndarray:
        """Return the tokens between two turns: int32 [B], B >= 1.

        They end the turn before them, unless its own last token does, and begin the model's next one.

        Args:
            observations: The texts of the environment's messages.
            last: The last token of the turn before them.

        Raises:
            ChatTemplateError: The template rejects the messages, leaves one out, or they can't be encoded after a turn.
        """
        try:
            token_ids = self._encode_after(_STUB, observations)
        except ValueError as error:
            raise ChatTemplateError(f"an observation can't be encoded: {error}") from error
        return np.array(token_ids[1:] if token_ids[0] == last else token_ids, dtype=np.int32)

    def _encode_after(self, before: Messages, observations: Sequence[str]) -> list[int]:
        """Return the tokens that the template writes after the text of the last turn, which ends `before`.

        Both sides of the turn are taken from the same rendering: before its text, a template may write what depends on
        the messages that follow, such as an empty block of reasoning, and the trajectory has its own tokens there.
        """
        chat, messages = self._chat, [*before, *self._messages(observations)]
        rendered = chat.render(messages)
        head, found, tail = rendered.partition(before[-1]["content"])
        if not found:
            raise ValueError(f"{chat.name} leaves out the text of an assistant's message")
        if not all(_has(tail, text) for text in observations):
            raise ValueError(f"{chat.name} leaves out the text of a message of role {self._role!r} after a turn")
        head_ids = self._encode_head(head + found)
        token_ids = chat.encode(messages, rendered=rendered)
        if token_ids[: len(head_ids)] != head_ids or len(token_ids) == len(head_ids):
            raise ValueError(f"{chat.name} lets the tokens of a turn and those after it merge")
        return token_ids[len(head_ids) :]

    def _encode_head(self, text: str) -> list[int]:
        if text not in self._heads:
            self._heads.clear()
            self._heads[text] = self._chat.encode_text(text)
        return self._heads[text]

    def _check(self, texts: Sequence[str]) -> None:
        """Check that the template writes these messages in the same way after a first turn and after a second one."""
        longer: Messages = [*_STUB, *self._messages(texts), {"role": "assistant", "content": _SECOND_ANSWER}]
        try:
            first, second = self._encode_after(_STUB, texts), self._encode_after(longer, texts)
            if first != second:
                raise ValueError(f"{self._chat.name} writes other tokens after the second turn than after the first")
        except ValueError as error:
            raise ChatTemplateError(
                f"a chat can't go on with messages of role {self._role!r}: {error} (tried with "
                f"{', '.join(map(repr, texts))}); use a model whose chat_template.jinja writes them after any turn"
            ) from error

    def _drops_reasoning(self) -> bool:
        """Return whether an earlier turn loses its reasoning, in `<think>` or in marks that the template names."""
        for begin, end in _REASONING_MARKS:
            if begin.startswith("<think>") or end.strip() in self._chat.template:
                thinking = {"role": "assistant", "content": f"{begin}{_REASONING}{end}{_ANSWER}"}
                if _REASONING not in self._chat.render([_STUB[0], thinking, *self._messages(_TEXTS[:1])]):
                    return True
        return False

    def _messages(self, texts: Sequence[str]) -> Messages:
        return [{"role": self._role, "content": text} for text in texts]


def _has(written: str, text: str) -> bool:
    """Return whether a template has written a text: as it is or as a JSON string, but for white space."""
    if text in written:
        return True
    written = "".join(written.split())
    return any("".join(form.split()) in written for form in (text, json.dumps(text, ensure_ascii=False)[1:-1]))


class Dialogue:
    """The chat of the model with one environment of a run.

    Args:
        config: The environment, and its limits.
        chat: The chat template, with the environment's tools.
        max_prompt_tokens: The longest prompt, with what the environment's reset adds to it.

    Attributes:
        config: The environment.
        reads_turns: Whether the tokenizer reads the calls in turns.

    Raises:
        ChatTemplateError: The model's chat template can't continue a chat with messages of tools. Whether it can with
            those of a class is known once that has named their role. Or it doesn't say how calls are written.
    """

    def __init__(self, config: EnvironmentConfig, chat: ChatTemplate, max_prompt_tokens: int) -> None:
        self.config, self._own_chat, self._max_prompt_tokens = config, chat, max_prompt_tokens
        self._chat = lru_cache(MAX_CHATS)(self._make_chat)  # by the tools that an environment's reset has added
        self._environment_tokens = lru_cache(MAX_CHATS)(self._make_environment_tokens)
        self._has_warned = False
        self.reads_turns = isinstance(config, ProgramEnvironment) and config.parser == "template"
        if self.has_tools:
            self.check("tool")
        if self.reads_turns:
            chat.check_response_template()

    @property
    def has_tools(self) -> bool:
        """Whether the environment is tools, whose timeouts the model can cause."""
        return isinstance(self.config, ToolsEnvironment)

    def check(self, role: str, tools: str = "") -> None:
        """Check that the chat template continues a chat by messages of a role.

        Raises:
            ChatTemplateError: It can't.
        """
        self._environment_tokens(role, tools)

    def begin(self, prompt: PromptRow, reply: Reply) -> tuple[PromptRow, str | None]:
        """Return a row's prompt with what the reset has added to it, and why it failed, if it did."""
        if reply.failure is not None:
            return prompt, f"reset: {reply.failure.message}"
        if not reply.observations:
            return prompt, None
        messages = reply.messages if reply.roles else [*prompt.messages, *reply.messages]
        try:
            token_ids = self._chat(reply.tools).encode(messages)
        except ChatTemplateError as error:
            return prompt, f"reset: {error}; let reset() return None, or end the row's prompt with another role"
        except (ValueError, RecursionError) as error:  # the latter of tools that are nested deeply
            return prompt, f"reset: {error}"
        if len(token_ids) > self._max_prompt_tokens:
            return prompt, (
                f"reset: the prompt has {len(token_ids)} tokens with the environment's first message, more than "
                f"data.max_prompt_tokens = {self._max_prompt_tokens}; raise it, or let the environment begin with less"
            )
        text = "\n\n".join(message["content"] for message in messages)
        ids = np.array(token_ids, dtype=np.int32)
        return replace(prompt, prompt_ids=ids, prompt_text=text, messages=messages, tools=reply.tools), None

    def encode(self, reply: Reply) -> np.ndarray:
        """Return the tokens of a whole chat, up to the beginning of the model's turn: int64 [L].

        Raises:
            ChatTemplateError: The chat template can't write it.
        """
        try:
            return np.array(self._chat(reply.tools).encode(reply.messages), dtype=np.int64)
        except ChatTemplateError:
            raise
        except (ValueError, RecursionError) as error:
            raise ChatTemplateError(f"a chat can't be encoded: {error}") from error

    def environment_tokens(self, role: str, observations: Sequence[str], last_id: int, tools: str = "") -> np.ndarray:
        """Return the tokens from the end of a turn, whose last one is `last_id`, to the beginning of the next one.

        Raises:
            ChatTemplateError: The chat template can't write the observations.
        """
        return self._environment_tokens(role, tools).encode(observations, last_id)

    def parse(self, turn: str, before: str, tools: str) -> dict[str, Any] | None:
        """Return a turn of a chat with these tools as the tokenizer reads it (`ChatTemplate.parse`); None: it can't.

        The first turn that can't be read is warned of.
        """
        try:
            return self._chat(tools).parse(turn, before)
        except ChatTemplateError as error:
            logger.log(
                logging.DEBUG if self._has_warned else logging.WARNING,
                "%s; the program gets it as a text, and so all turns like it, which are not warned of again",
                error,
            )
            self._has_warned = True
            return None

    def _make_chat(self, tools: str) -> ChatTemplate:
        return self._own_chat.with_tools(json.loads(tools)) if tools else self._own_chat

    def _make_environment_tokens(self, role: str, tools: str) -> EnvironmentTokens:
        several, drops_reasoning = self.has_tools or bool(tools), self.config.drops_reasoning
        return EnvironmentTokens(self._chat(tools), role, drops_reasoning=drops_reasoning, several=several)
