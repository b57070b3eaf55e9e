"""How the rows of one environment are written: its limits, its chat template, and the tokens between two turns."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from infra.datasets import PromptRow
from infra.environments.bridge import TurnBridge
from infra.environments.reply import Reply
from rl_core.rollout.chat import ChatTemplate
from schemas.config.environment import EnvironmentConfig, ToolsEnvironment
from schemas.errors import ChatTemplateError


class Dialogue:
    """The chat of the model with one environment of a run.

    Args:
        config: The environment, and its limits.
        chat: The chat template, with the environment's tools.
        max_prompt_tokens: The longest prompt, with what the environment's reset adds to it.

    Raises:
        ChatTemplateError: The model's chat template can't continue a chat with messages of tools. Whether it can with
            those of a class is known once that has named their role.
    """

    def __init__(self, config: EnvironmentConfig, chat: ChatTemplate, max_prompt_tokens: int) -> None:
        self.config, self._chat, self._max_prompt_tokens = config, chat, max_prompt_tokens
        self._bridges: dict[str, TurnBridge] = {}
        if self.has_tools:
            self._bridge("tool")

    @property
    def has_tools(self) -> bool:
        """Whether the environment is tools, whose timeouts the model can cause."""
        return isinstance(self.config, ToolsEnvironment)

    def begin(self, prompt: PromptRow, reply: Reply) -> tuple[PromptRow, str | None]:
        """Return a row's prompt with what the reset has added to it, and why it failed, if it did."""
        if reply.failure is not None:
            return prompt, f"reset: {reply.failure.message}"
        if not reply.observations:
            return prompt, None
        messages = [*prompt.messages, *({"role": reply.role, "content": text} for text in reply.observations)]
        try:
            token_ids = self._chat.encode(messages)
        except ChatTemplateError as error:
            return prompt, f"reset: {error}; let reset() return None, or end the row's prompt with another role"
        except ValueError as error:
            return prompt, f"reset: {error}"
        if len(token_ids) > self._max_prompt_tokens:
            return prompt, (
                f"reset: the prompt has {len(token_ids)} tokens with the environment's first message, more than "
                f"data.max_prompt_tokens = {self._max_prompt_tokens}; raise it, or let the environment begin with less"
            )
        text = "\n\n".join(message["content"] for message in messages)
        ids = np.array(token_ids, dtype=np.int32)
        return replace(prompt, prompt_ids=ids, prompt_text=text, messages=messages), None

    def bridge(self, role: str, observations: Sequence[str], last_id: int) -> np.ndarray:
        """Return the tokens from the end of a turn, whose last one is `last_id`, to the beginning of the next one.

        Raises:
            ChatTemplateError: The chat template can't write the observations.
        """
        return self._bridge(role).encode(observations, last_id)

    def _bridge(self, role: str) -> TurnBridge:
        if role not in self._bridges:
            self._bridges[role] = TurnBridge(
                self._chat, role, drops_reasoning=self.config.drops_reasoning, several=self.has_tools
            )
        return self._bridges[role]
