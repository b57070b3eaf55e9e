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


Metric = Annotated[Mean | Sum | Max, Field(discriminator="kind")]
Metrics = dict[str, Metric]


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Reduce the metrics of several micro-batches, updates or workers into one set.

    Raises:
        TypeError: Two parts report the same name with different reductions.
    """
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            previous = merged.get(name)
            if previous is not None and previous.kind != metric.kind:
                raise TypeError(f"metric {name!r} is a {metric.kind} here and a {previous.kind} elsewhere")
            # Both are of the same kind, which mypy can't infer.
            merged[name] = metric if previous is None else previous.merge(metric)  # type: ignore[arg-type]
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the plain numbers of `metrics`, for logs."""
    return {name: metric.value for name, metric in metrics.items()}
