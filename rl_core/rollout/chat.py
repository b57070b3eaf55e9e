"""A model's chat template, with a run's variables and tools."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rl_core.rollout.control_tokens import ControlTokens, Messages
from schemas.errors import ChatTemplateError, DataError

# What a template raises by itself, and what its expressions do.
_REJECTIONS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class ChatTemplate:
    """Renders and encodes chats. In a message's content, a control token's name is text.

    Args:
        tokenizer: The tokenizer, which has the template.
        variables: Variables of the template.
        tools: JSON schemas of the tools that the model may call.
        setting: What sets the variables, for the error.

    Attributes:
        template: The template.
        name: Which it is, for errors.

    Raises:
        DataError: The template has no variable of a given name, or none for tools.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        setting: str = "data.chat_template_kwargs",
    ) -> None:
        self.tokenizer, self._control = tokenizer, ControlTokens(tokenizer)
        self._variables = dict(variables or {})
        self.template = str(tokenizer.get_chat_template())
        path = tokenizer.name_or_path
        self.name = f"the chat template of {path}" if path else "the model's chat template"
        if unused := [name for name in self._variables if not _uses(self.template, name)]:
            raise DataError(
                f"{setting}: the model's chat template has no variable {', '.join(unused)}; remove it, "
                "or check its name in the tokenizer's chat_template.jinja"
            )
        if tools and not _uses(self.template, "tools"):
            raise DataError(
                "the model's chat template has no variable `tools`, so that the model would not learn which tools it "
                "may call; use a model whose chat_template.jinja has it"
            )
        if tools:
            self._variables["tools"] = list(tools)

    def render(self, messages: Messages, *, with_prompt: bool = True) -> str:
        """Return a chat as text, ending with the beginning of the model's turn if `with_prompt`.

        Raises:
            ChatTemplateError: The template rejects the chat.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=with_prompt, **self._variables
            )
        except _REJECTIONS as error:
            roles, reason = ", ".join(message["role"] for message in messages), " ".join(str(error).split())
            raise ChatTemplateError(f"{self.name} rejects a chat of the roles {roles}: {reason}") from error
        return str(text)

    def find_control_token(self, messages: Messages) -> str | None:
        """Return the first name of a control token in the texts of a chat."""
        return self._control.find(messages)

    def encode(self, messages: Messages, *, with_prompt: bool = True, rendered: str | None = None) -> list[int]:
        """Return a chat's token ids.

        Args:
            messages: The chat.
            with_prompt: Whether they end with the beginning of the model's turn.
            rendered: What `render` returns for the same; None: it is rendered here.

        Raises:
            ChatTemplateError: The template rejects the chat.
            ValueError: A content has a control token's name, and can't be encoded as text.
        """
        if self._control.find(messages):
            return self._control.encode(messages, lambda chat: self.render(chat, with_prompt=with_prompt))
        return self.encode_text(self.render(messages, with_prompt=with_prompt) if rendered is None else rendered)

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a rendered chat, or of the beginning of one."""
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids


def _uses(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None
