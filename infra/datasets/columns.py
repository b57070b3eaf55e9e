"""The columns of prompt data, those of verl, and of rows with given answers, as other trainers name them."""

from collections.abc import Callable, Iterable

from schemas.errors import DataError

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")
TOKENS, MASK_COLUMN = ("prompt_ids", "response_ids"), "loss_mask"
SFT_COLUMNS = (TOKENS, ("messages",), ("conversations",), ("prompt", "completion"), ("text",))
"""The columns that a row with a given answer may have: tokens of a stored step, perhaps with a mask; a chat, under
either name; a prompt and its completion; a text.

Of a file with several of these kinds, the first is read."""
OTHER_COLUMNS = ("extra_info",)
TOOLS_COLUMN = "tools"  # of a chat with a given answer: JSON schemas

ColumnChoice = Callable[[str, Iterable[str]], list[str]]  # of a file's columns, those to read; by its path

CONVERSION = (
    "e.g. by Hugging Face datasets: dataset.map(lambda row: {'data_source': 'mine', 'prompt': row['question'], "
    "'reward_model': {'ground_truth': row['answer']}}).to_parquet('rows.parquet')"
)

_TEXT_ONLY = "prompts are text alone; remove the column, and the rows that need it"
UNSUPPORTED_COLUMNS = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _TEXT_ONLY),
    TOOLS_COLUMN: "tools are the run's, not a row's; name them in environment.tools, and remove the column",
    "chat_template_kwargs": "variables of the chat template are the run's, not a row's; set data.chat_template_kwargs, "
    "and remove the column",
}
"""Columns that other trainers put into the prompt, and what to do instead."""


def known_columns(path: str, names: Iterable[str]) -> list[str]:
    """Return the columns, of those that a file has, that are read or refused.

    Raises:
        DataError: A required one is missing, or there are two of one name.
    """
    names = list(names)
    for name in REQUIRED_COLUMNS:
        if name not in names:
            raise DataError(
                f"{path}: no column {name!r}; it has {', '.join(names)} but needs {', '.join(REQUIRED_COLUMNS)}: "
                f"write them, {CONVERSION}"
            )
    known = [name for name in names if name in (*REQUIRED_COLUMNS, *OTHER_COLUMNS, *UNSUPPORTED_COLUMNS)]
    if repeated := [name for name in known if known.count(name) > 1]:
        raise DataError(
            f"{path}: {known.count(repeated[0])} columns are named {repeated[0]!r}; rename or remove all but one"
        )
    return known


def sft_columns(path: str, names: Iterable[str]) -> list[str]:
    """Return the columns of rows with given answers, of those that a file has, that are read or refused.

    Raises:
        DataError: It has none of `SFT_COLUMNS`.
    """
    names = list(names)
    if (found := next((kind for kind in SFT_COLUMNS if {*kind} <= {*names}), None)) is None:
        kinds = ", or ".join(" and ".join(kind) for kind in SFT_COLUMNS)
        raise DataError(f"{path}: it has the columns {', '.join(names)}, but supervised fine-tuning needs {kinds}")
    optional = (MASK_COLUMN,) if found == TOKENS else ()
    return [name for name in names if name in (*found, *optional, *UNSUPPORTED_COLUMNS)]
