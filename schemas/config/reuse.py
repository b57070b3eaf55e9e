"""Groups of stored steps that later steps train on again."""

from typing import Annotated

from pydantic import AfterValidator, NonNegativeInt, PositiveInt, model_validator

from schemas.base import FrozenConfig, OptionalText


def _is_range(steps: tuple[int, int]) -> tuple[int, int]:
    if steps[0] >= steps[1]:
        raise ValueError(f"{list(steps)} is empty; give the first step and the one after the last, e.g. [0, 10]")
    return steps


class ReuseConfig(FrozenConfig):
    """Groups of stored steps, with different rewards, that a step trains on besides those that it samples.

    They come from the run's own steps, not older than `max_age`, or from given `steps` of another `run`.
    """

    num_groups: PositiveInt
    """Stored groups per step, in addition to its `rollout.num_prompts`; fewer if there are no more with variance."""

    max_age: PositiveInt | None = None
    """Own steps: step k takes groups of steps k - `max_age` to k - 1; None: `steps` of another `run` are used."""

    run: OptionalText = None
    """Directory or URL of another run, whose groups are taken in place of own ones; None: the run's own."""

    steps: Annotated[tuple[NonNegativeInt, NonNegativeInt], AfterValidator(_is_range)] | None = None
    """Steps of that run, counted from 0: the first, and the one after the last; all of them must be kept."""

    @model_validator(mode="after")
    def _has_one_source(self) -> "ReuseConfig":
        if self.run is None and (self.max_age is None or self.steps is not None):
            raise ValueError(
                "groups of the run's own steps need data.reuse.max_age, and no data.reuse.steps; for those of another "
                "run, set data.reuse.run and data.reuse.steps"
            )
        if self.run is not None and (self.steps is None or self.max_age is not None):
            raise ValueError(
                f"groups of run {self.run} need data.reuse.steps, e.g. [0, 10], and no data.reuse.max_age, as its "
                "steps are no older or newer than those of this run"
            )
        return self
