"""Environments: what answers the model's turns."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from schemas.base import FrozenConfig
from schemas.config.kinds import ImportPath, JsonObject


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
    """Selects a Python class."""

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
    """Selects tools."""

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


class ProgramEnvironment(TurnLimits):
    """A program, started for each trajectory, that asks the model itself, over OpenAI's or Anthropic's API."""

    kind: Literal["program"] = "program"
    """Selects a program."""

    command: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    """The program and its arguments; `{workdir}` is the run's working directory, `{python}` its interpreter."""

    grader: ImportPath | None = None
    """Import path of a function that rewards a trajectory, `module:function`; None: what the program prints."""

    memory_bytes: PositiveInt = 2**32
    """Most address space of each of its processes, in bytes (RLIMIT_AS)."""

    @property
    def what(self) -> str:
        """What it is, for messages."""
        return f"program {' '.join(self.command)}"

    @property
    def import_paths(self) -> tuple[str, ...]:
        """The user's code that it imports."""
        return () if self.grader is None else (self.grader,)

    @model_validator(mode="after")
    def _is_started_by_the_run(self) -> "ProgramEnvironment":
        if self.python is not None:
            raise ValueError(
                f"environment.python = {self.python!r} has no effect on a program; name its interpreter in "
                "environment.command, such as {workdir}/venv/bin/python"
            )
        return self


EnvironmentConfig = Annotated[ClassEnvironment | ToolsEnvironment | ProgramEnvironment, Field(discriminator="kind")]
