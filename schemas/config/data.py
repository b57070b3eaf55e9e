"""Where the prompts come from."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from schemas.base import Frozen


class PromptSource(Frozen):
    """One of several weighted sources of prompts."""

    path: str
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0  # only the ratios of all weights count


class DataConfig(Frozen):
    """Prompts (Parquet, JSONL, or a folder of Hugging Face datasets' `save_to_disk`) with the columns `data_source`,
    `prompt` (chat list), `reward_model.ground_truth` and, optionally, `extra_info`.

    What is trained on is either `train_path` or `sources`; an empty value of the other is as if it weren't there.
    """

    train_path: Annotated[str | None, BeforeValidator(lambda path: path or None)] = None
    sources: tuple[PromptSource, ...] = ()
    eval_path: str | None = None
    max_prompt_tokens: PositiveInt = 1024
    overlong: Literal["error", "drop"] = "error"  # what to do with a longer prompt; drops are counted
    shuffle: bool = True

    @model_validator(mode="after")
    def _one_or_several(self) -> "DataConfig":
        if self.train_path is None and not self.sources:
            raise ValueError(
                "nothing to train on; set data.train_path to one file, or give several as [[data.sources]] with a path "
                "and a weight each"
            )
        if self.train_path is not None and self.sources:
            raise ValueError(
                "data.train_path and data.sources are both set; leave one out (data.train_path= and data.sources=[] "
                "clear them on the command line)"
            )
        return self

    @property
    def train_sources(self) -> tuple[PromptSource, ...]:
        """What is trained on, one file or several, with weights."""
        return self.sources if self.train_path is None else (PromptSource(path=self.train_path),)
