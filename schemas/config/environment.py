"""Environments: what answers the model's turns."""

import re
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from schemas.base import FrozenConfig
from schemas.config.kinds import ImportPath, JsonObject, default_kind


class TurnLimits(FrozenConfig):
    """Settings of every environment: its limits, and the processes that it runs in."""

    max_turns: PositiveInt = 8
    """Most turns of the model in a trajectory."""

    max_turn_tokens: PositiveInt | None = None
    """Most tokens that the model samples in one turn; None: what is left of `rollout.max_response_tokens`."""

    max_observation_characters: PositiveInt = 10_000
    """Longest observation in characters; a longer one is cut, and its end says so."""

    resume_rows: Literal["lockstep", "batch", "as_ready"] = "lockstep"
    """When a row samples its next turn: a number of steps after its last one, with all others, or once answered."""

    lockstep_steps: PositiveInt = 16
    """Decoding steps that an environment has for an answer in lockstep; after that, all rows wait for it."""

    journal: bool = True
    """Record answers until their step's rows are stored, so that what is played again asks for none of them twice."""

    drops_reasoning: bool = False
    """Accept a chat template that would drop earlier turns' reasoning: it is kept, as it was sampled."""

    python: Annotated[str, Field(min_length=1)] | None = None
    """Python (3.10 or later) of the environment processes, such as a virtual environment's; None: the run's own."""

    num_processes: PositiveInt = 2
    """Environment processes per rollout worker; each runs many environments."""

    reset_timeout_seconds: PositiveFloat = 60.0
    """Time limit of making and resetting one environment."""

    step_timeout_seconds: PositiveFloat = 30.0
    """Time limit of one step."""

    trajectory_timeout_seconds: PositiveFloat = 600.0
    """Time limit of all of a trajectory's calls together."""


class ClassEnvironment(TurnLimits):
    """A Python class with `reset()` and `step(action)`, made from a data row and a seed."""

    kind: Literal["class"] = "class"

    path: ImportPath
    """Import path of the class, `module:Class`."""

    arguments: JsonObject = Field(default_factory=dict)
    """Keyword arguments of the class, in JSON's types."""

    @property
    def what(self) -> str:
        """What it is, for messages."""
        return f"class {self.path}"

    @property
    def import_paths(self) -> tuple[str, ...]:
        """The user's code that it imports."""
        return (self.path,)


class ToolsEnvironment(TurnLimits):
    """Python functions that the model may call; a turn without a call is its answer, and ends the trajectory."""

    kind: Literal["tools"] = "tools"

    tools: Annotated[tuple[ImportPath, ...], Field(min_length=1)]
    """Import paths of the functions, `module:function`; the schema is made of type hints and docstring."""

    parser: Literal["hermes", "json"] = "hermes"
    """How calls are written: JSON objects between `<tool_call>` and `</tool_call>`, or one as the whole turn."""

    @property
    def what(self) -> str:
        """What it is, for messages."""
        return f"tools {', '.join(self.tools)}"

    @property
    def import_paths(self) -> tuple[str, ...]:
        """The user's code that it imports."""
        return self.tools

    @model_validator(mode="after")
    def _names_differ(self) -> "ToolsEnvironment":
        names = [path.partition(":")[2] for path in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools are named {', '.join(twice)}; rename one: the model calls them by name")
        return self


class ProcessSandbox(FrozenConfig):
    """A process of the run's user, with limits, but with that user's files."""

    kind: Literal["process"] = "process"

    network: Literal["host", "none", "auto"] = "host"
    """`host`: the machine's; `none`: the model's API only; `auto`: `none` where the kernel lets users, else `host`."""


class ContainerSandbox(FrozenConfig):
    """A container of an image that is on the machine, by the command line of Docker or Podman."""

    kind: Literal["container"] = "container"

    image: Annotated[str, Field(min_length=1, pattern="^[^-]")]
    """Its image; it is never pulled."""

    program: Annotated[str, Field(min_length=1)] = "docker"
    """The command line that runs it: `docker`, `podman`, or the path of one."""

    network: Annotated[str, Field(min_length=1)] = "none"
    """Its network; `none` has the model's API only, `host` is the machine's, others are those of `docker network`."""

    options: tuple[str, ...] = ()
    """More options of `docker run`, each as `--name=value`, with `{workdir}`, the run's working directory."""

    @field_validator("options")
    @classmethod
    def _leave_the_rest_alone(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not re.fullmatch(r"--[a-z][a-z0-9-]*(=.+)?", option):
                raise ValueError(f"{option!r} is not of the form --name=value; write --gpus=all for -gpus all")
            if (name := option.partition("=")[0]) in _OWN_OPTIONS:
                raise ValueError(f"{name} is set by Sluice, as the program is started, watched and killed by it")
        return options


_OWN_OPTIONS = {
    *("--attach", "--cidfile", "--detach", "--entrypoint", "--interactive", "--name", "--net", "--network", "--pull"),
    *("--restart", "--rm", "--sig-proxy", "--tty", "--workdir"),
}


class ClassSandbox(FrozenConfig):
    """A class of your own with the methods of `rl_core.environments.base.Sandbox`, such as for machines elsewhere."""

    kind: Literal["class"] = "class"

    path: ImportPath
    """Import path of the class, `module:Class`."""

    arguments: JsonObject = Field(default_factory=dict)
    """Keyword arguments of the class, in JSON's types."""


SandboxConfig = Annotated[
    Annotated[ProcessSandbox | ContainerSandbox | ClassSandbox, Field(discriminator="kind")], default_kind("process")
]


class ProgramEnvironment(TurnLimits):
    """A program, started for each trajectory, that asks the model itself, over OpenAI's or Anthropic's API."""

    kind: Literal["program"] = "program"

    command: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    """The program and its arguments, with `{info.NAME}` of the data row; of a process, also `{workdir}`, `{python}`."""

    parser: Literal["hermes", "json", "template"] = "hermes"
    """How calls are written, see that of tools; with `template`, as the tokenizer's `response_template` says."""

    grader: ImportPath | None = None
    """Import path of a function that rewards a trajectory, `module:function`; None: what the program prints."""

    sandbox: SandboxConfig = Field(default_factory=ProcessSandbox)
    """Where it runs."""

    memory_bytes: PositiveInt = 2**32
    """Most address space of each of its processes, in bytes (RLIMIT_AS), or most memory of its container."""

    @property
    def what(self) -> str:
        """What it is, for messages."""
        return f"program {' '.join(self.command)}"

    @property
    def import_paths(self) -> tuple[str, ...]:
        """The user's code that it imports."""
        own = (self.sandbox.path,) if isinstance(self.sandbox, ClassSandbox) else ()
        return own if self.grader is None else (self.grader, *own)

    @model_validator(mode="after")
    def _is_started_by_the_run(self) -> "ProgramEnvironment":
        if self.python is not None:
            raise ValueError(
                f"environment.python = {self.python!r} has no effect on a program; name its interpreter in "
                "environment.command, such as {workdir}/venv/bin/python"
            )
        return self

    @field_validator("command")
    @classmethod
    def _is_one_program(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if "{info." in command[0]:
            raise ValueError(
                f"{command[0]!r} would be another program for each data row; name one program, and have the row's "
                'value among its arguments, such as ["{python}", "{workdir}/agents/{info.agent}.py"]'
            )
        return command

    @model_validator(mode="after")
    def _is_named_as_the_sandbox_knows_it(self) -> "ProgramEnvironment":
        if self.sandbox.kind == "process":
            return self
        for part in self.command:
            if unknown := next((place for place in ("{workdir}", "{python}") if place in part), None):
                raise ValueError(
                    f"environment.command has {unknown}, which is not in a sandbox of kind {self.sandbox.kind!r}; name "
                    'the paths that it has there, such as "python3" and those of its image'
                )
        return self


EnvironmentConfig = Annotated[ClassEnvironment | ToolsEnvironment | ProgramEnvironment, Field(discriminator="kind")]
