"""Rewards that a model gives: functions of whole groups, and what a model's folder must hold."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rl_core.model_folder import TOKENIZER_FILES, check_model_folder, load_config
from rl_core.rewards.base import ManagedReward, Score
from rl_core.rollout.chat import ChatTemplate
from schemas.config.reward_base import HostedReward
from schemas.errors import ChatTemplateError, DataError, ModelError


class GroupReward(ManagedReward):
    """A group function: scores all responses to a prompt together, and depends on no other prompt.

    So a step that is repeated has the same rewards, whichever worker scores a prompt, and when.
    """

    is_concurrent, max_calls = False, None

    async def prepare(self) -> None:
        """Do nothing: who holds the model has loaded it."""

    async def __call__(  # type: ignore[override]  # a group function
        self, prompt: str, completions: list[str], answer: str, info: dict[str, Any]
    ) -> list[Score | Exception]:
        """Do what `score` does."""
        return self.score(prompt, completions, answer)

    @abstractmethod
    def score(self, prompt: str, completions: Sequence[str], answer: str) -> list[Score | Exception]:
        """Return the score of each response to the prompt; for one without a score, the error."""


def describe_model(config: HostedReward, suffix: str, what: str) -> PreTrainedConfig:
    """Return the config of the model in a reward's folder.

    Args:
        config: The reward.
        suffix: What the model's architecture must end with.
        what: The model that is wanted, for the error.

    Raises:
        ModelError: It can't be loaded, or is of another architecture.
    """
    check_model_folder("reward.path", config.path)
    described = load_config(config.path, "reward.path")
    names = ", ".join(described.architectures or ["none"])
    if not names.endswith(suffix):
        raise model_error(
            config, f"its architecture is {names}, expected one that ends with {suffix}; use {what}'s folder"
        )
    return described


def check_positions(config: HostedReward, described: PreTrainedConfig, num_tokens: int, keys: str) -> None:
    """Check that a model has as many positions as these keys need.

    Raises:
        ModelError: It has fewer.
    """
    positions = getattr(described.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < num_tokens:
        raise model_error(config, f"the model has {positions} positions, fewer than {keys} = {num_tokens}; lower it")


def build_on_meta(config: HostedReward, described: PreTrainedConfig, auto_class: Any) -> PreTrainedModel:
    """Build a model in float32 on the meta device: its parameters have shapes but no memory.

    Args:
        config: The reward.
        described: The model's config.
        auto_class: transformers' class that builds models of its kind.

    Raises:
        ModelError: It can't be built.
    """
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto_class.from_config(described, dtype=torch.float32)
    except Exception as error:  # transformers and torch raise unrelated types for bad configs
        raise model_error(config, first_line(error)) from error
    return model


def load_hosted_tokenizer(config: HostedReward, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a reward's model.

    Raises:
        ModelError: It can't be loaded, has no chat template, or is not the model's.
    """
    check_model_folder("reward.path", config.path, TOKENIZER_FILES)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(config.path)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise model_error(config, f"the tokenizer can't be loaded: {first_line(error)}") from error
    if tokenizer.chat_template is None:
        raise model_error(
            config,
            "the tokenizer has no chat template, by which the texts are written; write one to "
            "chat_template.jinja in that folder",
        )
    largest, num_tokens = max(tokenizer.get_vocab().values()), len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    if largest >= num_tokens:
        raise model_error(
            config,
            f"the tokenizer's largest token id is {largest}, but the model has embeddings for {num_tokens} tokens (0 "
            f"to {num_tokens - 1}); use the tokenizer of this model",
        )
    return tokenizer


def open_chat(
    config: HostedReward,
    tokenizer: PreTrainedTokenizerBase,
    roles: Sequence[str],
    variables: Mapping[str, Any] | None = None,
    *,
    with_prompt: bool = True,
) -> ChatTemplate:
    """Return the chat template of a reward's model, which must write the contents of all messages.

    Args:
        config: The reward.
        tokenizer: The model's tokenizer.
        roles: Those of the messages that the model reads.
        variables: Variables of the template.
        with_prompt: Whether its chats end with the beginning of the model's turn.

    Raises:
        ModelError: The template lacks a variable, or rejects such messages, or leaves one of them out.
    """
    try:
        chat = ChatTemplate(tokenizer, variables, setting="reward.chat_template_kwargs")
        left_out = chat.find_left_out([(role, True) for role in roles], with_prompt=with_prompt)
    except (ChatTemplateError, DataError) as error:
        raise model_error(config, str(error)) from error
    if left_out is not None:
        raise model_error(
            config,
            f"its chat template leaves out the text of the {roles[left_out]}'s message, so that the model would not "
            "read it; use a model whose chat_template.jinja writes it, or correct that file",
        )
    return chat


def model_error(config: HostedReward, text: str) -> ModelError:
    """Return the error of a reward's folder."""
    return ModelError(f"reward.path {config.path}: {text}")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]
