"""The curriculum: how often prompts are taken from each source or difficulty, by recent success."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator

from schemas.base import FrozenConfig


class CurriculumSettings(FrozenConfig):
    """Settings of every curriculum: a weight is multiplied by 4 p (1 - p), where p is the recent success rate."""

    window: PositiveInt = 10
    """Finished steps over which the success rate is taken."""

    success_threshold: float = 0.99
    """A sample is a success if its reward is at least this."""

    min_factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Least factor on a weight: of a source that is always or never solved."""


class SourceCurriculum(CurriculumSettings):
    """A curriculum over `data.sources`."""

    kind: Literal["sources"] = "sources"
    """Selects the sources."""


class LevelCurriculum(CurriculumSettings):
    """A curriculum over levels of difficulty, which a number in each row's `extra_info` gives."""

    kind: Literal["levels"] = "levels"
    """Selects levels of difficulty."""

    field: Annotated[str, Field(min_length=1)]
    """Field of `extra_info` with the number."""

    starts: Annotated[tuple[float, ...], Field(min_length=2)]
    """The smallest number of each level, ascending; the last level has no end."""

    @field_validator("starts")
    @classmethod
    def _ascending(cls, starts: Sequence[float]) -> Sequence[float]:
        if any(high <= low for low, high in pairwise(starts)):
            raise ValueError(f"{list(starts)} is not ascending; give the smallest number of each level, in order")
        return starts

    @property
    def names(self) -> tuple[str, ...]:
        """The levels' names."""
        return tuple(f"{self.field}-{start:g}" for start in self.starts)


CurriculumConfig = Annotated[SourceCurriculum | LevelCurriculum, Field(discriminator="kind")]
