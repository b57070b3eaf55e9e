"""The tokens between two turns of the model: what the chat template writes for an environment's messages.

A trajectory's tokens are append-only: what was sampled is never decoded and encoded again. So the tokens between turns
are those that the template adds to a stub of a chat, and the template must add the same ones to any chat.
"""

from collections.abc import Sequence

import numpy as np
from jinja2 import TemplateError

from rl_core.rollout.chat import ChatTemplate
from rl_core.rollout.control_tokens import Messages
from schemas.errors import ChatTemplateError

_QUESTION, _ANSWER = "question", "answer"
_STUB: Messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
_TEXTS = ("observation", " ", "\n3 < 4\n", "é")  # as which observations are tried out
_REASONING = "because"


class TurnBridge:
    """Encodes an environment's messages, from the end of one turn of the model to the beginning of the next.

    Args:
        chat: The chat template.
        role: The role of the messages.
        drops_reasoning: Whether a template that would drop earlier turns' reasoning is accepted.

    Raises:
        ChatTemplateError: The template rejects such messages, or what it writes depends on the turns before them.
    """

    def __init__(self, chat: ChatTemplate, role: str, *, drops_reasoning: bool = False) -> None:
        self._chat, self._role = chat, role
        try:
            self._before = self._encode_until_answer(_STUB)
            self._check(drops_reasoning)
        except TemplateError as error:
            raise ChatTemplateError(
                f"the model's chat template rejects messages of role {role!r} after a turn: {error}; use a model whose "
                "chat_template.jinja accepts them"
            ) from error

    def encode(self, observations: Sequence[str], last: int) -> np.ndarray:
        """Return the tokens between two turns: int32 [B], B >= 1.

        They end the turn before them, unless its own last token does, and begin the model's next one.

        Args:
            observations: The texts of the environment's messages.
            last: The last token of the turn before them.

        Raises:
            ChatTemplateError: The texts can't be encoded after a turn.
        """
        messages = [{"role": self._role, "content": text} for text in observations]
        try:
            token_ids = self._encode_after(_STUB, self._before, messages)
        except (TemplateError, ValueError) as error:
            raise ChatTemplateError(f"an observation can't be encoded: {error}") from error
        return np.array(token_ids[1:] if token_ids[0] == last else token_ids, dtype=np.int32)

    def _encode_until_answer(self, messages: Messages) -> list[int]:
        """Return the tokens of a chat up to the end of its last turn's text."""
        text = self._chat.render(messages, with_prompt=False)
        head, found, _ = text.rpartition(_ANSWER)
        if not found:
            raise ChatTemplateError("the model's chat template leaves out the text of an assistant's message")
        return self._chat.encode_text(head + found)

    def _encode_after(self, before: Messages, token_ids: list[int], messages: Messages) -> list[int]:
        """Return the tokens that the template adds to a chat, of which `token_ids` end with its last turn's text."""
        whole = self._chat.encode([*before, *messages])
        if whole[: len(token_ids)] != token_ids or len(whole) == len(token_ids):
            raise ValueError(
                "the chat template writes earlier turns differently once messages follow them, or their tokens merge"
            )
        return whole[len(token_ids) :]

    def _check(self, drops_reasoning: bool) -> None:
        for text in _TEXTS:
            messages = [{"role": self._role, "content": text}]
            try:
                first = self._encode_after(_STUB, self._before, messages)
                longer = [*_STUB, *messages, _STUB[1]]
                second = self._encode_after(longer, self._encode_until_answer(longer), messages)
            except ValueError as error:
                raise ChatTemplateError(
                    f"a chat of several turns can't be continued token by token: {error} (tried with {text!r}); use a "
                    "model whose chat_template.jinja only adds to a chat"
                ) from error
            if first != second:
                raise ChatTemplateError(
                    "the model's chat template writes other tokens after the second turn than after the first, so that "
                    "a chat can't be continued token by token; use a model whose chat_template.jinja doesn't"
                )
        if not drops_reasoning and self._rewrites_reasoning():
            raise ChatTemplateError(
                "the model's chat template drops the reasoning of earlier turns, but a trajectory keeps what was "
                "sampled; set environment.drops_reasoning = true to train and evaluate with reasoning kept"
            )

    def _rewrites_reasoning(self) -> bool:
        thinking = {"role": "assistant", "content": f"<think>\n{_REASONING}\n</think>\n\n{_ANSWER}"}
        text = self._chat.render([_STUB[0], thinking, {"role": self._role, "content": _TEXTS[0]}])
        return _REASONING not in text
