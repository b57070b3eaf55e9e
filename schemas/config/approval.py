"""Limits of a step's metrics: beyond one of them, a run pauses until somebody decides how it goes on."""

import re
from typing import Any, Literal

from pydantic import field_validator, model_validator

from schemas.base import FrozenConfig
from schemas.errors import MetricError
from schemas.metric_catalog import metric_spec

_LIMIT = re.compile(r"\s*(\S+)\s*([<>])\s*(\S+)\s*")


class MetricLimit(FrozenConfig):
    """A condition on a metric of a finished step, e.g. `kl > 0.2`; in a config it may be written as that text.

    Example:
        >>> limit = MetricLimit.model_validate("reward/failed_fraction > 0.25")
        >>> limit.is_exceeded({"reward/failed_fraction": 0.5}), limit.is_exceeded({})
        (True, False)
    """

    metric: str
    """A metric of the catalog."""

    comparison: Literal["<", ">"]
    """The side of `value` on which the run pauses."""

    value: float
    """The limit, in the metric's unit."""

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.value:g}"

    def is_exceeded(self, metrics: dict[str, float]) -> bool:
        """Return whether a step with these metrics needs approval; not if it lacks the metric."""
        found = metrics.get(self.metric)
        if found is None:
            return False
        return found > self.value if self.comparison == ">" else found < self.value

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        if (match := _LIMIT.fullmatch(given)) is None:
            raise ValueError(f"{given!r} is not of the form METRIC > NUMBER or METRIC < NUMBER, e.g. 'kl > 0.2'")
        return dict(zip(("metric", "comparison", "value"), match.groups(), strict=True))

    @field_validator("metric")
    @classmethod
    def _in_catalog(cls, name: str) -> str:
        try:
            metric_spec(name)
        except MetricError as error:
            raise ValueError(str(error)) from None
        return name
