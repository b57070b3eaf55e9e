"""Metrics that carry their reduction, so that no split into micro-batches changes the reported values."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Frozen


class Mean(Frozen):
    """A weighted mean: totals and weights are summed; `value` is total / weight, or 0 if the weight is 0."""

    kind: Literal["mean"] = "mean"
    total: float
    weight: float

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    def merge(self, other: "Mean") -> "Mean":
        return Mean(total=self.total + other.total, weight=self.weight + other.weight)


class Sum(Frozen):
    """A total."""

    kind: Literal["sum"] = "sum"
    value: float

    def merge(self, other: "Sum") -> "Sum":
        return Sum(value=self.value + other.value)


class Max(Frozen):
    """A maximum."""

    kind: Literal["max"] = "max"
    value: float

    def merge(self, other: "Max") -> "Max":
        return Max(value=max(self.value, other.value))


class EffectiveFraction(Frozen):
    """The effective sample size of importance weights, as a fraction of their number: (sum w)^2 / (n sum w^2).

    1 if all weights are equal, 1 / n if a single one outweighs the others (Kong 1992); 0 without weights.
    """

    kind: Literal["effective"] = "effective"
    total: float  # sum of the weights
    squares: float  # sum of their squares
    count: int

    @property
    def value(self) -> float:
        return self.total**2 / (self.count * self.squares) if self.squares else 0.0

    def merge(self, other: "EffectiveFraction") -> "EffectiveFraction":
        return EffectiveFraction(
            total=self.total + other.total, squares=self.squares + other.squares, count=self.count + other.count
        )


class Single(Frozen):
    """The only value of a step, such as its number of rollout rounds: it has no reduction, and can't be merged."""

    kind: Literal["single"] = "single"
    value: float


Reduction = Literal["mean", "sum", "max", "effective", "single"]
Metric = Annotated[Mean | Sum | Max | EffectiveFraction | Single, Field(discriminator="kind")]
Metrics = dict[str, Metric]


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Reduce the metrics of several micro-batches, updates or workers into one set.

    Raises:
        TypeError: Two parts report the same name with different reductions, or the same single value.

    Example:
        >>> first = {"loss": Mean(total=3.0, weight=1), "ratio_max": Max(value=1.5)}
        >>> second = {"loss": Mean(total=1.0, weight=3), "ratio_max": Max(value=1.2)}
        >>> values(merge_metrics([first, second]))
        {'loss': 1.0, 'ratio_max': 1.5}
    """
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _merge(name, merged[name], metric) if name in merged else metric
    return merged


def _merge(name: str, first: Metric, second: Metric) -> Metric:
    if first.kind != second.kind:
        raise TypeError(f"metric {name!r} is a {second.kind} here and a {first.kind} elsewhere")
    if isinstance(first, Single):
        raise TypeError(
            f"metric {name!r} is reported twice, as {first.value:g} and {second.value:g}, but it is a single value of "
            "the step: report it once, or as a Mean, Sum or Max"
        )
    return first.merge(second)  # type: ignore[arg-type]  # both are of the same kind, which mypy can't infer


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the plain numbers of `metrics`, for logs."""
    return {name: metric.value for name, metric in metrics.items()}
