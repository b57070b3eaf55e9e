"""The prompts of a run: rows ready to generate from, which of them a step takes, and whether the longest one fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.datasets.order import RowOrder
from rl_core.rollout.control_tokens import Messages
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.rollout import SourceSchedule

SHORTEN = 'lower that, or data.max_prompt_tokens with data.overlong = "drop"'


@dataclass(frozen=True)
class PromptRow:
    """One prompt, ready to generate responses to and to compute rewards with."""

    prompt_ids: np.ndarray  # int32 [P], P >= 1: the chat template applied, with the generation prompt
    prompt_text: str  # the messages' contents, a blank line between them
    answer: str
    info: dict[str, Any]  # `extra_info` and `data_source`
    data_source: str
    messages: Messages = field(default_factory=list)  # the chat
    environment: int | None = None  # its number among the run's environments; None: its response is one turn
    tools: str = ""  # JSON of those that its environment has added to the chat template; empty: none


@dataclass(frozen=True)
class LazyRow:
    """A row whose prompt is tokenized whenever it is asked for."""

    info: dict[str, Any]  # of the row
    data_source: str
    environment: int | None
    encode: Callable[[], PromptRow]


class PromptDataset:
    """The usable rows of one prompt file, in the file's order, or of several weighted files, concatenated.

    Attributes:
        rows: The rows, some of them maybe not tokenized.
        num_dropped: The number of rows dropped because their prompt is too long.
    """

    def __init__(self, rows: Sequence[PromptRow | LazyRow], num_dropped: int = 0) -> None:
        self.rows = rows
        self._order = RowOrder(sizes=(len(rows),), weights=(1.0,))
        self.num_dropped = num_dropped

    @staticmethod
    def mix(parts: Sequence["PromptDataset"], weights: Sequence[float]) -> "PromptDataset":
        """Mix several files, from which steps take rows in proportion to the weights.

        See `infra.datasets.order.RowOrder` for how.

        Args:
            parts: The files, each with at least one row.
            weights: One positive number per file; only their ratios matter.
        """
        mixed = PromptDataset([row for part in parts for row in part.rows], sum(part.num_dropped for part in parts))
        mixed._order = RowOrder(sizes=tuple(len(part) for part in parts), weights=tuple(weights))
        return mixed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PromptRow:
        row = self.rows[index]
        return row.encode() if isinstance(row, LazyRow) else row

    @property
    def max_prompt_tokens(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(len(self[number].prompt_ids) for number in range(len(self)))

    def rows_for_step(self, step: int, num_prompts: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
        """Return the row indices that `step` (from 0) takes: int64 [num_prompts].

        Epochs follow one another without end, each a permutation of all rows seeded by (seed, epoch); step k takes
        the k-th window of `num_prompts` rows. A window may span epochs, so a file with fewer rows repeats them. With
        several files, each has its own epochs. The result depends on nothing but the arguments, so a resumed run needs
        no cursor.

        >>> prompts = PromptDataset([PromptRow(np.array([1]), f"{n} + 1 =", f"{n + 1}", {}, "sums") for n in range(5)])
        >>> prompts.rows_for_step(0, num_prompts=3, seed=0, shuffle=False)
        array([0, 1, 2])
        >>> prompts.rows_for_step(1, num_prompts=3, seed=0, shuffle=False)
        array([3, 4, 0])
        """
        return self._order.rows_for_step(step, num_prompts, seed, shuffle)

    def rows_for_groups(
        self,
        step: int,
        groups: Sequence[int],
        num_prompts: int,
        seed: int,
        shuffle: bool,
        schedule: SourceSchedule | None = None,
    ) -> NDArray[np.int64]:
        """Return the row index of each of the step's `groups`, which are numbered from 0: int64 [G].

        Groups below `num_prompts` take the step's own rows, see `rows_for_step`. Groups from `num_prompts` on are extra
        groups (of dynamic sampling), which don't change what later steps take. Without shuffling, they continue through
        the file. With shuffling, they take successive permutations of all rows, seeded by (seed, step) and with the
        step's own rows last, so that no row repeats within a step while unused rows are left. With several files, this
        holds for each, and extra groups alternate between files as the next step's prompts would.

        With a curriculum, its `schedule` of the step chooses the source of each group, instead of the weights.
        """
        return self._order.rows_for_groups(step, groups, num_prompts, seed, shuffle, schedule)


def check_prompts(
    config: RunConfig, prompts: PromptDataset | None, held_out: PromptDataset | None, num_positions: int
) -> None:
    """Check that the longest prompt plus the longest response fit the model and, in training, a micro-batch.

    Args:
        config: The run's configuration.
        prompts: The training prompts; None: an evaluation has none.
        held_out: The evaluation prompts; evaluation packs no micro-batches.
        num_positions: The most tokens of a sequence that the model accepts.

    Raises:
        ConfigError: They don't fit.
    """
    if held_out is not None:
        limit = "rollout" if config.eval.max_response_tokens is None else "eval"
        response = config.eval.max_response_tokens or config.rollout.max_response_tokens
        _check_positions(config, held_out.max_prompt_tokens, response, f"{limit}.max_response_tokens", num_positions)
    if prompts is None:
        return
    prompt, response = prompts.max_prompt_tokens, config.rollout.max_response_tokens
    name = "rollout.max_response_tokens"
    _check_positions(config, prompt, response, name, num_positions)
    if prompt + response > config.packing.token_budget:
        raise ConfigError(
            f"{_sizes(prompt, response, name)} more than packing.token_budget = {config.packing.token_budget}; "
            f"raise it to at least {prompt + response}, or {SHORTEN}"
        )


def _check_positions(config: RunConfig, prompt: int, response: int, name: str, num_positions: int) -> None:
    if prompt + response > num_positions:
        raise ConfigError(
            f"{_sizes(prompt, response, name)} more than the {num_positions} positions of the model "
            f"{config.model.path}; {SHORTEN}"
        )


def _sizes(prompt: int, response: int, name: str) -> str:
    return f"the longest prompt has {prompt} tokens and {name} is {response}, together"
