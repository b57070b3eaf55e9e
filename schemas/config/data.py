"""The prompts to train and evaluate on."""

from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from schemas.base import FrozenConfig, OptionalText
from schemas.config.curriculum import CurriculumConfig, LevelCurriculum
from schemas.config.environment import EnvironmentConfig
from schemas.config.reuse import ReuseConfig
from schemas.config.template import TemplateVariables


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
    """Variables of the chat template, e.g. `enable_thinking = false`; a run sets `strftime_now`, if it has it."""

    shuffle: bool = True
    """Shuffle the prompts in every epoch, by the run's seed."""

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
