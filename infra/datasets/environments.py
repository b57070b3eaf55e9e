"""Which environment answers the turns of which rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.datasets.prompts import PromptDataset
from rl_core.environments.tools import tool_schemas
from schemas.config.environment import EnvironmentConfig, ToolsEnvironment
from schemas.config.run import RunConfig
from schemas.errors import DataError


@dataclass(frozen=True)
class RowEnvironment:
    """The environment of a row."""

    number: int | None = None  # its number among the run's environments; None: the row's response is one turn
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas of the tools that the chat template shows to the model


EnvironmentOf = Callable[[str], RowEnvironment]  # by the row's `data_source`


def always(environment: RowEnvironment) -> EnvironmentOf:
    """Return what finds the same environment for each row."""
    return lambda _: environment


def schemas_of_tools(config: EnvironmentConfig | None) -> Sequence[Mapping[str, Any]]:
    """Return the JSON schemas of the tools that a chat template shows to the model.

    Raises:
        EnvironmentImportError: A tool can't be loaded, or lacks types or a description.
    """
    return tool_schemas(config.tools) if isinstance(config, ToolsEnvironment) else ()


def environments_of_sources(config: RunConfig) -> list[RowEnvironment]:
    """Return the environment of the rows of each source of training prompts.

    Raises:
        EnvironmentImportError: See `schemas_of_tools`.
    """
    return [
        RowEnvironment(config.environments.index(environment), schemas_of_tools(environment))
        if environment is not None
        else RowEnvironment()
        for environment in config.environment_by_source
    ]


def held_out_environment(path: str, prompts: PromptDataset, environments: Sequence[RowEnvironment]) -> EnvironmentOf:
    """Return what finds the environment of a held-out row: that of the training prompts of its `data_source`.

    Args:
        path: The held-out prompts.
        prompts: The training prompts.
        environments: Of the sources of training prompts. If all are the same, a held-out row has it in any case.
    """
    by_number = {environment.number: environment for environment in environments}
    if len(by_number) == 1:
        return always(environments[0])
    known: dict[str, set[int | None]] = {}
    for row in prompts.rows:
        known.setdefault(row.data_source, set()).add(row.environment)

    def environment_of(data_source: str) -> RowEnvironment:
        if data_source not in known:
            raise DataError(
                f"{path}: no training prompt has the data_source {data_source!r}, so that the environment of these "
                f"held-out prompts isn't known; name them as those of one of data.sources: {', '.join(sorted(known))}"
            )
        if len(known[data_source]) > 1:
            raise DataError(
                f"{path}: training prompts of the data_source {data_source!r} have different environments, so that the "
                "one of these held-out prompts isn't known; give each of data.sources data_source names of its own"
            )
        return by_number[next(iter(known[data_source]))]

    return environment_of
