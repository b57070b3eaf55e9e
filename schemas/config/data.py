"""The prompts to train and evaluate on."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from schemas.base import FrozenConfig, OptionalText

_TEMPLATE_OPTIONS = {"conversation", "messages", "tokenize", "add_generation_prompt", "chat_template", "return_dict"}


class PromptSource(FrozenConfig):
    """One of several weighted sources of prompts."""

    path: str
    """Path of the prompts: Parquet, JSONL, or a folder of Hugging Face datasets' `save_to_disk`."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Relative frequency of the source's prompts; only the ratios of all weights matter."""


class DataConfig(FrozenConfig):
    """Prompts (Parquet, JSONL, or a folder of Hugging Face datasets' `save_to_disk`) with the columns `data_source`,
    `prompt` (chat list), `reward_model.ground_truth` and, optionally, `extra_info`.

    Exactly one of `train_path` and `sources` must be set; an empty value counts as not set.
    """

    train_path: OptionalText = None
    """Path of the training prompts; None: `sources` are used."""

    sources: tuple[PromptSource, ...] = ()
    """Several weighted sources of training prompts; empty: `train_path` is used."""

    eval_path: OptionalText = None
    """Path of the held-out prompts; None: no evaluation."""

    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt in tokens, chat template included."""

    overlong: Literal["error", "drop"] = "error"
    """A longer prompt is an error, or is dropped and counted."""

    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Variables of the model's chat template, such as `enable_thinking = false`; for training and held-out prompts."""

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

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_sluices_own(cls, given: dict[str, Any]) -> dict[str, Any]:
        if own := sorted(given.keys() & _TEMPLATE_OPTIONS):
            raise ValueError(
                f"{', '.join(own)} can't be set: Sluice renders prompts as messages with a generation prompt"
            )
        return given

    @property
    def train_sources(self) -> tuple[PromptSource, ...]:
        """The sources of training prompts, one or several."""
        return self.sources if self.train_path is None else (PromptSource(path=self.train_path),)
