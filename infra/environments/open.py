"""Open the environments of a config: their processes, their tools, and the episodes played with them."""

from contextlib import closing

from transformers import PreTrainedTokenizerBase

from infra.datasets import PromptDataset, PromptRow
from infra.datasets.environments import schemas_of_tools
from infra.engines.base import RolloutEngine
from infra.environments.bridge import Dialogue, TurnBridge
from infra.environments.episodes import Episodes
from infra.environments.pool import EnvironmentClass, EnvironmentPool
from infra.environments.slot import Reply
from rl_core.environments.base import Task
from rl_core.rollout.chat import ChatTemplate
from schemas.config.environment import EnvironmentConfig, ToolsEnvironment
from schemas.config.run import RunConfig
from schemas.errors import DataError, EnvironmentImportError

_TOOLS = "rl_core.environments.tools:ToolEnvironment"


def open_episodes(config: RunConfig, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> Episodes | None:
    """Return what plays a run's trajectories, whose environments are loaded; None if a response is one turn.

    Raises:
        ChatTemplateError: The model's chat template can't continue a chat by turns.
        EnvironmentImportError: An environment can't be loaded.
    """
    if not config.environments:
        return None
    limit = config.data.max_prompt_tokens
    dialogues = [Dialogue(each, _chat(config, each, tokenizer), limit) for each in config.environments]
    pool = EnvironmentPool(*map(environment_class, config.environments))
    pool.start()
    pool.wait_until_ready()
    return Episodes(dialogues, engine, pool, tokenizer)


def check_environments(config: RunConfig, tokenizer: PreTrainedTokenizerBase, prompts: PromptDataset) -> None:
    """Check that a run's environments can be made, each for its first prompt, and that the chat template continues it.

    Raises:
        ChatTemplateError: The model's chat template can't.
        DataError: Making or resetting an environment fails, or what that adds to the prompt doesn't fit.
        EnvironmentImportError: An environment can't be loaded.
    """
    rows = [prompts[number] for number in range(len(prompts))]
    for number, environment in enumerate(config.environments):
        _check_environment(config, environment, tokenizer, next(row for row in rows if row.environment == number))


def check_tools(config: RunConfig) -> None:
    """Load the tools of a run in processes first, as importing their modules may end this one.

    Raises:
        EnvironmentImportError: A process ended, or took too long, while it loaded them. What else is wrong with a tool
            is found when it is loaded here.
    """
    for environment in config.environments:
        if isinstance(environment, ToolsEnvironment):
            failure = _first_reply(environment, Task(prompt=[], answer="", info={}), config.seed).failure
            if failure is not None and failure.kind in ("died", "timeout"):
                raise EnvironmentImportError(
                    f"environment.tools {', '.join(map(repr, environment.tools))}: loading them failed in a process: "
                    f"{failure.message}; what their modules do when they are imported ends it, or takes too long"
                )


def environment_class(config: EnvironmentConfig) -> EnvironmentClass:
    """Return what a pool needs of an environment."""
    if isinstance(config, ToolsEnvironment):
        arguments = {"tools": list(config.tools), "parser": config.parser}
        return EnvironmentClass(_TOOLS, config, arguments)
    return EnvironmentClass(config.path, config, config.arguments)


def _check_environment(
    config: RunConfig, environment: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase, first: PromptRow
) -> None:
    task = Task(prompt=first.messages, answer=first.answer, info=first.info)
    reply = _first_reply(environment, task, config.seed)
    chat = _chat(config, environment, tokenizer)
    dialogue = Dialogue(environment, chat, config.data.max_prompt_tokens)
    if reply.failure is None:
        TurnBridge(chat, reply.role, drops_reasoning=environment.drops_reasoning)
    _, failure = dialogue.begin(first, reply)
    if failure is not None:
        name = ", ".join(environment.tools) if isinstance(environment, ToolsEnvironment) else environment.path
        raise DataError(f"environment {name} can't begin with its first training prompt: {failure}")


def _first_reply(environment: EnvironmentConfig, task: Task, seed: int) -> Reply:
    """Return how an environment answers its reset, in a process of its own."""
    with closing(EnvironmentPool(environment_class(environment.replace(num_processes=1)))) as pool:
        pool.start()
        pool.wait_until_ready()
        pool.open(0, task, seed)
        return pool.wait()[0]


def _chat(config: RunConfig, environment: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    return ChatTemplate(tokenizer, config.data.chat_template_kwargs, schemas_of_tools(environment))
