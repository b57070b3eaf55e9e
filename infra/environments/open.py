"""Open the environment of a config: its processes, its tools, and the episodes played with it."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from infra.datasets import PromptRow
from infra.engines.base import RolloutEngine
from infra.environments.bridge import TurnBridge
from infra.environments.episodes import Episodes
from infra.environments.pool import EnvironmentPool
from rl_core.environments.base import Task
from rl_core.environments.tools import tool_schemas
from rl_core.rollout.chat import ChatTemplate
from schemas.config.environment import EnvironmentConfig, ToolsEnvironment
from schemas.config.run import RunConfig
from schemas.errors import DataError

_TOOLS = "rl_core.environments.tools:ToolEnvironment"


def schemas_of_tools(config: EnvironmentConfig | None) -> Sequence[Mapping[str, Any]]:
    """Return the JSON schemas of the tools that a chat template shows to the model.

    Raises:
        EnvironmentImportError: A tool can't be loaded, or lacks types or a description.
    """
    return tool_schemas(config.tools) if isinstance(config, ToolsEnvironment) else ()


def open_episodes(config: RunConfig, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> Episodes | None:
    """Return what plays a run's trajectories, whose environment is loaded; None if a response is one turn.

    Raises:
        ChatTemplateError: The model's chat template can't continue a chat by turns.
        EnvironmentImportError: The environment can't be loaded.
    """
    if config.environment is None:
        return None
    chat = _chat(config, config.environment, tokenizer)
    pool = _pool(config.environment)
    pool.start()
    pool.wait_until_ready()
    return Episodes(config.environment, engine, pool, chat, config.data.max_prompt_tokens)


def check_environment(config: RunConfig, tokenizer: PreTrainedTokenizerBase, first: PromptRow) -> None:
    """Check that a run's environment can be made for a prompt, and that the model's chat template can continue it.

    Raises:
        ChatTemplateError: It can't.
        DataError: Making or resetting the environment fails.
        EnvironmentImportError: The environment can't be loaded.
    """
    if (environment := config.environment) is None:
        return
    pool = _pool(environment.replace(num_processes=1))
    pool.start()
    try:
        pool.wait_until_ready()
        pool.open(0, Task(prompt=first.messages, answer=first.answer, info=first.info), config.seed)
        reply = pool.wait()[0]
    finally:
        pool.close()
    if reply.failure is not None:
        raise DataError(f"the environment of the first training prompt can't be reset: {reply.failure.message}")
    TurnBridge(_chat(config, environment, tokenizer), reply.role, drops_reasoning=environment.drops_reasoning)


def _chat(config: RunConfig, environment: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    return ChatTemplate(tokenizer, config.data.chat_template_kwargs, schemas_of_tools(environment))


def _pool(config: EnvironmentConfig) -> EnvironmentPool:
    if isinstance(config, ToolsEnvironment):
        arguments = {"tools": list(config.tools), "parser": config.parser}
        return EnvironmentPool(_TOOLS, arguments, config, replays=False)  # tools keep nothing between calls
    return EnvironmentPool(config.path, config.arguments, config)
