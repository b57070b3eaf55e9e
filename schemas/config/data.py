"""The prompts to train and evaluate on: their files, the curriculum over them, and the reuse of stored groups."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from schemas.base import FrozenConfig, OptionalText
from schemas.config.environment import EnvironmentConfig
from schemas.config.kinds import CLOCK, TemplateVariables, Variable


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


class LevelCurriculum(CurriculumSettings):
    """A curriculum over levels of difficulty, which a number in each row's `extra_info` gives."""

    kind: Literal["levels"] = "levels"

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


class PromptSource(FrozenConfig):
    """One of several weighted sources of prompts."""

    path: str
    """Path of the prompts: a file, a folder of shards, or a pattern such as `train-*.parquet`."""

    name: OptionalText = None
    """Name in metrics; None: the last part of the path, without its ending."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Relative frequency of the source's prompts; only the ratios of all weights matter."""

    environment: EnvironmentConfig | None = None
    """What answers the model's turns to the source's prompts; None: the run's `environment`, if it has one."""

    @property
    def label(self) -> str:
        """The name in metrics."""
        return self.name or PurePath(self.path.removesuffix(".gz")).stem


class DataConfig(FrozenConfig):
    """Prompts with the columns `data_source`, `prompt` (chat list), `reward_model.ground_truth` and, optionally,
    `extra_info`.

    A path is a file (Parquet, JSONL, JSON, CSV, or one of an Arrow stream), a folder of Parquet or JSONL shards, a
    pattern such as `train-*.parquet`, or a folder of Hugging Face datasets' `save_to_disk`.

    Exactly one of `train_path` and `sources` must be set; an empty value counts as not set.
    """

    train_path: OptionalText = None
    """Path of the training prompts; None: `sources` are used."""

    sources: tuple[PromptSource, ...] = ()
    """Several weighted sources of training prompts; empty: `train_path` is used."""

    curriculum: CurriculumConfig | None = None
    """How the frequencies of sources or difficulties follow recent success; None: by weight alone."""

    reuse: ReuseConfig | None = None
    """Groups of stored steps that are trained on again; None: every step trains on what it samples alone."""

    eval_path: OptionalText = None
    """Path of the held-out prompts; None: no evaluation."""

    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt in tokens, chat template included."""

    overlong: Literal["error", "drop"] = "error"
    """A longer prompt is an error, or is dropped and counted."""

    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """Variables of the chat template, e.g. `enable_thinking = false`. A run sets `strftime_now`, its first day."""

    shuffle: bool = True
    """Shuffle the prompts in every epoch, by the run's seed."""

    @property
    def date(self) -> Variable | None:
        """The day that chat templates take for today; None: the day on which they are rendered."""
        return self.chat_template_kwargs.get(CLOCK)

    def with_date(self, date: Variable) -> "DataConfig":
        """Return these settings with a day that chat templates take for today."""
        return self.replace(chat_template_kwargs={**self.chat_template_kwargs, CLOCK: date})

    @model_validator(mode="after")
    def _one_or_several(self) -> "DataConfig":
        if self.train_path is None and not self.sources:
            raise ValueError(
                "nothing to train on; set data.train_path to one file, or several [[data.sources]] with a path and a "
                "weight each"
            )
        if self.train_path is not None and self.sources:
            raise ValueError(
                "data.train_path and data.sources are both set; leave one out (on the command line, data.train_path= "
                "or data.sources=[] clears it)"
            )
        return self

    @model_validator(mode="after")
    def _curriculum_has_sources(self) -> "DataConfig":
        if self.curriculum is None:
            return self
        if self.curriculum.kind == "levels" and self.sources:
            raise ValueError(
                'data.curriculum.kind = "levels" takes one file, but data.sources are set; set data.train_path '
                'instead, or data.curriculum.kind = "sources"'
            )
        if self.curriculum.kind == "sources" and len(self.sources) < 2:
            raise ValueError(
                f'data.curriculum.kind = "sources" chooses among data.sources, of which there are {len(self.sources)}; '
                'give two or more, or set data.curriculum.kind = "levels"'
            )
        names = self.source_names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two of data.sources are named {twice[0]!r}; give one of them another name")
        return self

    @property
    def train_sources(self) -> tuple[PromptSource, ...]:
        """The sources of training prompts, one or several."""
        return self.sources if self.train_path is None else (PromptSource(path=self.train_path),)

    @property
    def paths(self) -> list[str]:
        """The places of all rows: training prompts, then those held out, if there are any."""
        return [*(source.path for source in self.train_sources), *([self.eval_path] if self.eval_path else [])]

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of what a curriculum chooses among: sources or levels, K."""
        if isinstance(self.curriculum, LevelCurriculum):
            return self.curriculum.names
        return tuple(source.label for source in self.train_sources)

    @property
    def source_weights(self) -> tuple[float, ...]:
        """Their weights, K; levels have the same."""
        if isinstance(self.curriculum, LevelCurriculum):
            return (1.0,) * len(self.curriculum.starts)
        return tuple(source.weight for source in self.train_sources)
