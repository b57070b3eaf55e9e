"""Where the prompts come from."""

from typing import Literal

from pydantic import PositiveInt

from schemas.base import Frozen


class DataConfig(Frozen):
    """Prompt files (Parquet or JSONL) with the columns `data_source`, `prompt` (chat list),
    `reward_model.ground_truth` and, optionally, `extra_info`."""

    train_path: str
    eval_path: str | None = None
    max_prompt_tokens: PositiveInt = 1024
    overlong: Literal["error", "drop"] = "error"  # what to do with a longer prompt; drops are counted
    shuffle: bool = True
