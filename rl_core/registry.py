"""Typed registries: the function of each kind of a config union.

A registry is a literal with one line per kind, which mypy checks: the function's first parameter must accept the config
class. The kind itself is that of the class.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, Generic, ParamSpec, TypeVar

from pydantic import BaseModel

from schemas.config.kinds import configs_of, kind_of

Config = TypeVar("Config", bound=BaseModel)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Entry(Generic[Parameters, Result]):
    """The function of one kind; create it with `entry`, which checks its type."""

    config: type[BaseModel]
    function: Callable[..., Result]


def entry(
    config: type[Config], function: Callable[Concatenate[Config, Parameters], Result]
) -> Entry[Parameters, Result]:
    """Pair a config class with its function, which takes a config of this class and further arguments."""
    return Entry(config, function)


class Registry(Generic[Parameters, Result]):
    """The functions of all kinds of a config union; calling it calls the function of the config's kind.

    Args:
        name: The registry's import path, for error messages.
        union: The union alias, such as `AdvantageConfig`.
        *entries: One entry for each kind of the union.

    Raises:
        LookupError: A kind of the union has no entry, an entry is not of the union, or a kind has two.

    Example:
        >>> from schemas.config.loss import MaskedCorrection, TruncatedCorrection
        >>> upper_bound = Registry(
        ...     "example.upper_bound",
        ...     TruncatedCorrection | MaskedCorrection,
        ...     entry(TruncatedCorrection, lambda config: config.cap),
        ...     entry(MaskedCorrection, lambda config: config.high),
        ... )
        >>> upper_bound(TruncatedCorrection(cap=3.0))
        3.0
    """

    def __init__(self, name: str, union: object, *entries: Entry[Parameters, Result]) -> None:
        self.name = name
        self._functions = {each.config: each.function for each in entries}
        members = configs_of(union)
        for config in members:
            self._require(config)
        if others := [each.config.__name__ for each in entries if each.config not in members]:
            raise LookupError(f"{name} has entries for {', '.join(others)}, which its config union lacks")
        if len(entries) != len(members):
            raise LookupError(f"{name} has {len(entries)} entries for {len(members)} kinds; each needs exactly one")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that have a function."""
        return tuple(kind_of(config) for config in self._functions)

    def __call__(self, config: BaseModel, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Call the function of the config's kind.

        Raises:
            LookupError: The registry has no entry for the config's class.
        """
        self._require(type(config))
        return self._functions[type(config)](config, *args, **kwargs)

    def _require(self, config: type[BaseModel]) -> None:
        if config not in self._functions:
            raise LookupError(
                f"{self.name} has no entry for kind {kind_of(config)!r} ({config.__name__}); "
                f"add entry({config.__name__}, <function>)"
            )
