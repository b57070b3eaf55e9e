"""The configuration of a pipeline: stages that start from each other's models, a gate, and what is promoted."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from schemas.base import FrozenConfig
from schemas.batch import SafeName

_STAGE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
MAX_SWEEP = 100  # runs


def _stage_name(value: str) -> str:
    if not _STAGE_NAME.fullmatch(value):
        raise ValueError("use letters, digits and '_', and start with a letter: it is part of run ids and queries")
    return value


StageName = Annotated[str, AfterValidator(_stage_name)]


class StageConfig(FrozenConfig):
    """A stage: one run, or a sweep of runs whose best one goes on."""

    config: str
    """The config of its run: a TOML file, or the name of a built-in one."""

    set: dict[str, Any] = Field(default_factory=dict)
    """Changes to that config by dotted key, after those of the pipeline's own `set`."""

    model: StageName | None = None
    """The stage whose model this one starts from; None: `model.path` of its config."""

    teachers: dict[str, StageName] = Field(default_factory=dict)
    """Stages whose models teach this one, by their names in `distillation.teachers`."""

    sweep: dict[str, Any] = Field(default_factory=dict)
    """Lists of values by dotted key; there is one run for each combination."""

    max_runs: PositiveInt = 1
    """Runs of the sweep at the same time."""

    best: str | None = None
    """A query for the `run_id` of the best run of the sweep; None: the best held-out accuracy or loss at the end."""

    @model_validator(mode="after")
    def _sweep_has_values(self) -> "StageConfig":
        for key, values in flat_changes(self.sweep).items():
            if not isinstance(values, list | tuple) or not values:
                raise ValueError(f"sweep has {key} = {values!r}; give a list of the values to try, or leave it out")
        if (num_runs := math.prod(len(values) for values in flat_changes(self.sweep).values())) > MAX_SWEEP:
            raise ValueError(f"sweep has {num_runs} combinations, more than {MAX_SWEEP}; give fewer values")
        if not self.sweep and (self.max_runs > 1 or self.best is not None):
            raise ValueError("max_runs and best are of a sweep, and there is none; add sweep, or leave them out")
        return self

    @model_validator(mode="after")
    def _models_are_given_once(self) -> "StageConfig":
        if both := (self.used_stages.keys() & (flat_changes(self.set) | flat_changes(self.sweep)).keys()):
            key = min(both)
            raise ValueError(f"{key} is the model of stage {self.used_stages[key]}, and set to something else, too")
        return self

    @property
    def used_stages(self) -> dict[str, str]:
        """The stages whose models this one needs, by the key of its config that names the model."""
        teachers = {f"distillation.teachers.{name}.path": stage for name, stage in self.teachers.items()}
        return ({"model.path": self.model} if self.model else {}) | teachers

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield the changes of each run of the sweep; one without changes if there is no sweep."""
        swept = flat_changes(self.sweep)
        for values in itertools.product(*swept.values()):
            yield dict(zip(swept, values, strict=True))


class GateConfig(FrozenConfig):
    """What the last stage's model must reach to be promoted: all of what is set."""

    min_accuracy: float | None = Field(default=None, ge=0, le=1)
    """Least held-out accuracy at the end of the last stage."""

    min_gain: float | None = Field(default=None, ge=-1, le=1)
    """Least gain in held-out accuracy over the model that the last stage started from."""

    data_path: str | None = None
    """Prompts or rows for both, a whole file; None: the held-out ones of the last stage, from its own evaluations."""

    query: str | None = None
    """A query over the runs whose only value must be true; `$STAGE` is the run id of a stage, of a sweep its best."""

    @model_validator(mode="after")
    def _asks_something(self) -> "GateConfig":
        if self.min_accuracy is None and self.min_gain is None and self.query is None:
            raise ValueError("it asks nothing; set min_accuracy, min_gain or query, or leave [gate] out")
        if self.data_path is not None and not self.needs_accuracy:
            raise ValueError("data_path is for min_accuracy and min_gain; set one of these, or leave it out")
        return self

    @property
    def needs_accuracy(self) -> bool:
        """Whether it asks for an accuracy of the last stage."""
        return self.min_accuracy is not None or self.min_gain is not None


class ExportConfig(FrozenConfig):
    """Where the models of the stages are written, and the last one is promoted."""

    folder: str | None = None
    """Local folder: models are in `ID/STAGE`, and `current` links to the promoted one; None: `models/NAME`."""

    dtype: str | None = None
    """`float32`, `bfloat16` or `float16` of the last stage's model; None: that of the model it started from."""


class PipelineConfig(FrozenConfig):
    """Stages in their order, a gate, and the export of the last stage's model."""

    name: SafeName = "pipeline"
    """Prefix of the pipeline's id, with which the ids of its runs begin."""

    set: dict[str, Any] = Field(default_factory=dict)
    """Changes to the configs of all stages by dotted key."""

    stages: dict[StageName, StageConfig] = Field(min_length=1)
    """The stages by name; they run in the order of the file."""

    gate: GateConfig | None = None
    """What the last stage's model must reach to be promoted; None: nothing."""

    export: ExportConfig = Field(default_factory=ExportConfig)
    """Where the models are written."""

    @model_validator(mode="after")
    def _stages_use_earlier_ones(self) -> "PipelineConfig":
        names = list(self.stages)
        for number, (name, stage) in enumerate(self.stages.items()):
            for used in stage.used_stages.values():
                if used not in self.stages:
                    raise ValueError(f"stage {name} uses the model of {used}, but the stages are {', '.join(names)}")
                if used not in names[:number]:
                    raise ValueError(
                        f"stage {name} uses the model of {used}, which doesn't come before it; stages run in the order "
                        "of the file, and none can use its own model or that of a later one"
                    )
        return self

    @property
    def folder(self) -> str:
        """Where the models are written."""
        return self.export.folder or f"models/{self.name}"

    @property
    def last_stage(self) -> str:
        """The stage whose model is promoted."""
        return list(self.stages)[-1]

    def first_stage_of(self, name: str) -> str:
        """Return the stage at which the chain of models that a stage starts from begins; maybe itself."""
        while (model := self.stages[name].model) is not None:
            name = model
        return name


def flat_changes(changes: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return changes by dotted key, whether their keys are dotted or tables within tables.

    >>> flat_changes({"optim.lr": 1, "rollout": {"num_prompts": 2}})
    {'optim.lr': 1, 'rollout.num_prompts': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in changes.items():
        flat |= flat_changes(value, f"{place}{key}.") if isinstance(value, Mapping) else {f"{place}{key}": value}
    return flat
