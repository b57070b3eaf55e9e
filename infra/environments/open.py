"""Open the environments of a config: their processes, their tools, and the episodes played with them."""

from contextlib import closing
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from infra.datasets import PromptDataset, PromptRow
from infra.datasets.environments import schemas_of_tools
from infra.engines.base import RolloutEngine
from infra.engines.families import branch_fault
from infra.environments.dialogue import Dialogue
from infra.environments.episodes import Episodes
from infra.environments.launch import fill
from infra.environments.pool import EnvironmentClass, EnvironmentPool
from infra.environments.sandbox import check_sandbox, network_fault
from infra.environments.slot import Reply
from rl_core.environments.base import Task
from rl_core.rollout.chat import ChatTemplate
from schemas.config.environment import EnvironmentConfig, ProcessSandbox, ProgramEnvironment, ToolsEnvironment
from schemas.config.rollout import EngineRollout
from schemas.config.run import RunConfig
from schemas.errors import DataError, EnvironmentImportError

REST_FRACTION = 1 / 6  # of a program's time limits, in which it may come to rest
_PROGRAM = "infra.environments.program:Program"
_TOOLS = "rl_core.environments.tools:ToolEnvironment"


def open_episodes(config: RunConfig, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> Episodes | None:
    """Return what plays a run's trajectories, whose environments are loaded; None if a response is one turn.

    Raises:
        ChatTemplateError: The model's chat template can't continue a chat by turns.
        ConfigError: There is no program or image of that name on this machine.
        EnvironmentImportError: An environment can't be loaded.
        ServiceError: Nothing runs containers on this machine.
    """
    if not config.environments:
        return None
    for each in config.environments:
        _check_program(each)
    limit = config.data.max_prompt_tokens
    dialogues = [Dialogue(each, _chat(config, each, tokenizer), limit) for each in config.environments]
    pool = EnvironmentPool(*(environment_class(each, config.rollout) for each in config.environments))
    pool.start()
    pool.wait_until_ready()
    return Episodes(dialogues, engine, pool, tokenizer, partial(branch_fault, config))


def check_environments(config: RunConfig, tokenizer: PreTrainedTokenizerBase, prompts: PromptDataset) -> None:
    """Check that a run's environments can be made, each for its first prompt, and that the chat template continues it.

    Raises:
        ChatTemplateError: The model's chat template can't.
        ConfigError: There is no such program or image, or its command names what the first prompt's row doesn't have.
        DataError: Making or resetting an environment fails, or what that adds to the prompt doesn't fit.
        EnvironmentImportError: An environment can't be loaded.
        ServiceError: Nothing runs containers on this machine.
    """
    rows = [prompts[number] for number in range(len(prompts))]
    for number, environment in enumerate(config.environments):
        first = next(row for row in rows if row.environment == number)
        _check_program(environment)
        if isinstance(environment, ProgramEnvironment):
            fill(environment.command, first.info)
        _check_environment(config, environment, tokenizer, first)


def check_tools(config: RunConfig) -> None:
    """Load the tools of a run in processes first, as importing their modules may end this one.

    Raises:
        EnvironmentImportError: A process ended, or took too long, while it loaded them. What else is wrong with a tool
            is found when it is loaded here.
    """
    for environment in config.environments:
        if isinstance(environment, ToolsEnvironment):
            failure = _first_reply(config, environment, Task(prompt=[], answer="", info={})).failure
            if failure is not None and failure.kind in ("died", "timeout"):
                raise EnvironmentImportError(
                    f"environment.tools {', '.join(map(repr, environment.tools))}: loading them failed in a process: "
                    f"{failure.message}; what their modules do when they are imported ends it, or takes too long"
                )


def environment_class(config: EnvironmentConfig, rollout: EngineRollout) -> EnvironmentClass:
    """Return what a pool needs of an environment, whose model samples by these settings."""
    if isinstance(config, ToolsEnvironment):
        return EnvironmentClass(_TOOLS, config, {"tools": list(config.tools), "parser": config.parser})
    if isinstance(config, ProgramEnvironment):
        arguments: dict[str, Any] = {"command": list(config.command), "sandbox": _sandbox(config)}
        arguments |= {"parser": config.parser, "grader": config.grader, "memory_bytes": config.memory_bytes}
        limit = min(config.reset_timeout_seconds, config.step_timeout_seconds)
        rest = 0.0 if config.resume_rows == "as_ready" else limit * REST_FRACTION
        arguments |= {"sampling": _sampling(config, rollout), "rest_seconds": rest}
        return EnvironmentClass(_PROGRAM, config, arguments)
    return EnvironmentClass(config.path, config, config.arguments)


def _check_environment(
    config: RunConfig, environment: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase, first: PromptRow
) -> None:
    task = Task(prompt=first.messages, answer=first.answer, info=first.info)
    reply = _first_reply(config, environment, task)
    chat = _chat(config, environment, tokenizer)
    dialogue = Dialogue(environment, chat, config.data.max_prompt_tokens)
    if reply.failure is None:
        dialogue.check("tool" if reply.tools else reply.role, reply.tools)
    _, failure = dialogue.begin(first, reply)
    if failure is not None:
        raise DataError(f"environment {environment.what} can't begin with its first training prompt: {failure}")


def _first_reply(config: RunConfig, environment: EnvironmentConfig, task: Task) -> Reply:
    """Return how an environment answers its reset, in a process of its own."""
    with closing(EnvironmentPool(environment_class(environment.replace(num_processes=1), config.rollout))) as pool:
        pool.start()
        pool.wait_until_ready()
        pool.open(0, task, config.seed)
        return pool.wait()[0]


def _check_program(config: EnvironmentConfig) -> None:
    if isinstance(config, ProgramEnvironment):
        check_sandbox(config.sandbox.model_dump(mode="json"), config.command)


def _sandbox(config: ProgramEnvironment) -> dict[str, Any]:
    """Return the sandbox of programs, whose network doesn't depend on which process starts one, or when."""
    sandbox = config.sandbox.model_dump(mode="json")
    if isinstance(config.sandbox, ProcessSandbox) and config.sandbox.network == "auto":
        sandbox["network"] = "host" if network_fault() else "none"
    return sandbox


def _sampling(config: ProgramEnvironment, rollout: EngineRollout) -> dict[str, Any]:
    """Return what a program's requests may set to this value only, as APIs name it; or higher, of a limit."""
    limit = config.max_turn_tokens or rollout.max_response_tokens
    sampling = {name: getattr(rollout, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return sampling | dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), limit)


def _chat(config: RunConfig, environment: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    return ChatTemplate(tokenizer, config.data.chat_template_kwargs, schemas_of_tools(environment))
