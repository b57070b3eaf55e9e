"""Rows by level of difficulty."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from infra.datasets.prompts import PromptDataset
from schemas.config.data import LevelCurriculum
from schemas.errors import DataError


def level_of(place: str, info: Mapping[str, Any], levels: LevelCurriculum) -> int:
    """Return the number of the level, from 0, that a row belongs to.

    Args:
        place: Names the row in the error.
        info: The row's `extra_info`.
        levels: The levels, and the field that decides.

    Raises:
        DataError: The row has no such field, or it isn't a number, or one below all levels.
    """
    if levels.field not in info:
        raise DataError(
            f"{place}: extra_info has no {levels.field!r}, which data.curriculum.field names; it has {', '.join(info)}"
        )
    value = info[levels.field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= levels.starts[0]:
        raise DataError(
            f"{place}: extra_info.{levels.field} is {value!r:.80}; expected a number of at least {levels.starts[0]:g}, "
            "the smallest of data.curriculum.starts"
        )
    return bisect_right(levels.starts, value) - 1


def split_levels(path: str, prompts: PromptDataset, levels: LevelCurriculum) -> list[PromptDataset]:
    """Return the prompts of each level, in the file's order.

    Raises:
        DataError: A level has none.
    """
    rows = [prompts[number] for number in range(len(prompts))]
    numbers = [level_of(path, row.info, levels) for row in rows]
    parts = []
    for level, name in enumerate(levels.names):
        own = [row for row, number in zip(rows, numbers, strict=True) if number == level]
        if not own:
            raise DataError(f"{path} has no rows of level {name}; change data.curriculum.starts, or add such rows")
        parts.append(PromptDataset(own, prompts.num_dropped if level == 0 else 0))
    return parts
