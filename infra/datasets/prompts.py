"""The prompts of a run: rows that are ready to generate from, and which of them a step takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.datasets.order import RowOrder


@dataclass(frozen=True)
class PromptRow:
    """One prompt, ready to generate from and to score against."""

    prompt_ids: np.ndarray  # int32 [P], P >= 1: the chat template applied, with the generation prompt
    prompt_text: str  # the messages' contents, a blank line between them
    answer: str
    info: dict[str, Any]  # `extra_info` and `data_source`
    data_source: str


class PromptDataset:
    """The usable rows of one prompt file, in the file's order, or of several weighted ones, one after the other.

    Attributes:
        num_dropped: Rows left out because their prompt is too long.
    """

    def __init__(self, rows: list[PromptRow], num_dropped: int = 0) -> None:
        self._rows = rows
        self._order = RowOrder(sizes=(len(rows),), weights=(1.0,))
        self.num_dropped = num_dropped

    @classmethod
    def mix(cls, parts: Sequence["PromptDataset"], weights: Sequence[float]) -> "PromptDataset":
        """Several files' rows, of which steps take shares by weight, see `infra.datasets.order.RowOrder`.

        Args:
            parts: The files, each with at least one row.
            weights: One positive number each; only their ratios count.
        """
        mixed = cls([row for part in parts for row in part._rows], sum(part.num_dropped for part in parts))
        mixed._order = RowOrder(sizes=tuple(len(part) for part in parts), weights=tuple(weights))
        return mixed

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self._rows[index]

    @property
    def max_prompt_tokens(self) -> int:
        """The length of the longest prompt."""
        return max(len(row.prompt_ids) for row in self._rows)

    def rows_for_step(self, step: int, num_prompts: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
        """Return the row indices that `step` (from 0) takes: int64 [num_prompts].

        Epochs, each a permutation of all rows seeded by (seed, epoch), follow one another without end; step k
        takes the k-th window of `num_prompts`. A window may span epochs, so a file with fewer rows repeats
        them. Of several files each has epochs of its own. Nothing but the arguments counts: a resumed run needs
        no cursor.
        """
        return self._order.rows_for_step(step, num_prompts, seed, shuffle)

    def rows_for_groups(
        self, step: int, groups: Sequence[int], num_prompts: int, seed: int, shuffle: bool
    ) -> NDArray[np.int64]:
        """Return the row index of each of the step's `groups`, which are numbered from 0: int64 [G].

        The groups below `num_prompts` take the step's own rows, see `rows_for_step`; those from there on are
        further ones, and move no cursor. Without shuffling they go on in the file. With it, they take
        permutations of all rows, one after the other, seeded by (seed, step) and with the step's own rows last:
        no row comes twice in a step while there are others. Of several files this holds for each; which one a
        further group is of goes on from the step's last prompt.
        """
        return self._order.rows_for_groups(step, groups, num_prompts, seed, shuffle)
