"""The row of each prompt of each step: a function of config and step, so that a resumed run needs no cursor.

K sources, whose rows are numbered consecutively; P prompts per step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from rl_core.rollout.curriculum import draw_sources
from rl_core.rollout.seeding import derive_seed
from schemas.rollout import SourceSchedule


@dataclass(frozen=True)
class RowOrder:
    """The order of the rows of K weighted sources.

    Prompts are numbered over the whole run: prompt i of step k has number k P + i. Source 0 takes the numbers n at
    which floor(n w_0) increases, where w_0 is its weight over the sum of all weights; each following source takes what
    the sources before it leave, in the same way. So a source's fraction of the first n prompts, and of any n
    consecutive prompts, equals its weight to within K / n, without randomness. Within each source, epochs follow one
    another, each a permutation of all its rows.
    """

    sizes: tuple[int, ...]  # K, the number of rows of each source, at least 1
    weights: tuple[float, ...]  # K, positive; only their ratios matter

    def rows_for_step(self, step: int, num_prompts: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
        """Return the rows that `step` (from 0) takes: int64 [num_prompts]; see `PromptDataset.rows_for_step`."""
        return self.rows_for_groups(step, range(num_prompts), num_prompts, seed, shuffle)

    def rows_for_groups(
        self,
        step: int,
        groups: Sequence[int],
        num_prompts: int,
        seed: int,
        shuffle: bool,
        schedule: SourceSchedule | None = None,
    ) -> NDArray[np.int64]:
        """Return the row of each of the step's `groups`: int64 [G]; see `PromptDataset.rows_for_groups`."""
        wanted = np.asarray(groups, dtype=np.int64)
        count = max(num_prompts, int(wanted.max(initial=-1)) + 1)
        if schedule is None:
            sources, positions = self._locate(step * num_prompts + np.arange(count, dtype=np.int64))
        else:
            sources, positions = _locate_by(schedule, count)
        if not shuffle:
            return self._rows_at(sources, positions, seed, shuffle)[wanted]
        own = self._rows_at(sources[:num_prompts], positions[:num_prompts], seed, shuffle)
        return np.concatenate([own, self._extra_rows(step, sources[num_prompts:], own, seed)])[wanted]

    def _rows_at(
        self, sources: NDArray[np.int64], positions: NDArray[np.int64], seed: int, shuffle: bool
    ) -> NDArray[np.int64]:
        """Return the rows at these positions among their source's prompts."""
        rows = np.empty_like(sources)
        for source, (start, size) in enumerate(zip(self._starts, self.sizes, strict=True)):
            mine = sources == source
            order_of_epoch = (
                partial(_epoch_order, size, _source_seed(seed, source)) if shuffle else partial(_file_order, size)
            )
            rows[mine] = start + _index_epochs(positions[mine], size, order_of_epoch)
        return rows

    def _extra_rows(
        self, step: int, sources: NDArray[np.int64], own: NDArray[np.int64], seed: int
    ) -> NDArray[np.int64]:
        """Return the rows of groups of these sources, after the step's own, whose rows are `own`: int64.

        Each source starts with rows that the step doesn't have.
        """
        rows = np.empty_like(sources)
        for source, (start, size) in enumerate(zip(self._starts, self.sizes, strict=True)):
            mine = sources == source
            taken = np.isin(np.arange(start, start + size), own)
            order_of_epoch = partial(_extra_order, taken, _source_seed(seed, source), step)
            rows[mine] = start + _index_epochs(np.arange(mine.sum()), size, order_of_epoch)
        return rows

    def num_taken(self, number: int) -> list[int]:
        """Return how many of the first `number` prompts are of each source: K.

        Example:
            >>> RowOrder(sizes=(2, 8), weights=(1.0, 1.0)).num_taken(5)
            [2, 3]
        """
        counts = []
        for numerator, denominator in self._fractions:
            counts.append(number * numerator // denominator)
            number -= counts[-1]
        return counts

    def epoch_prompts(self) -> list[float]:
        """Return how many prompts, of all sources, each source's epoch takes: K."""
        total = sum(self.weights)
        return [size * total / weight for size, weight in zip(self.sizes, self.weights, strict=True)]

    def _locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each prompt's source and its position among that source's prompts: int64, shaped as `numbers`."""
        located = [self._locate_one(int(number)) for number in numbers]
        sources, positions = np.array(located, dtype=np.int64).reshape(-1, 2).T
        return sources, positions

    def _locate_one(self, number: int) -> tuple[int, int]:
        for source, (numerator, denominator) in enumerate(self._fractions):
            before = number * numerator // denominator
            if (number + 1) * numerator // denominator > before:
                return source, before
            number -= before
        raise AssertionError("the last source takes everything that the others leave")

    @cached_property
    def _fractions(self) -> tuple[tuple[int, int], ...]:
        """Each source's fraction of what the sources before it leave, as a ratio of integers; the last one's is 1."""
        weights = [Fraction(str(weight)) for weight in self.weights]  # the decimal as written: 0.1 is 1/10
        fractions = [weight / sum(weights[source:]) for source, weight in enumerate(weights)]
        return tuple((fraction.numerator, fraction.denominator) for fraction in fractions)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The first row of each source."""
        return tuple(int(start) for start in np.cumsum([0, *self.sizes[:-1]]))


def _locate_by(schedule: SourceSchedule, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the source and position of the first `count` prompts of a schedule's step: int64 [count] each."""
    sources = draw_sources(schedule, count)
    positions = np.empty_like(sources)
    for source, first in enumerate(schedule.positions):
        mine = sources == source
        positions[mine] = first + np.arange(mine.sum())
    return sources, positions


def _index_epochs(
    positions: NDArray[np.int64], size: int, order_of_epoch: Callable[[int], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return the rows at `positions` of the concatenated epochs, of which number e is `order_of_epoch(e)` [size]."""
    epochs, within = np.divmod(positions, size)
    rows = np.empty_like(positions)
    for epoch in np.unique(epochs):
        rows[epochs == epoch] = order_of_epoch(int(epoch))[within[epochs == epoch]]
    return rows


def _file_order(size: int, epoch: int) -> NDArray[np.int64]:
    return np.arange(size, dtype=np.int64)


def _epoch_order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size)


def _extra_order(taken: NDArray[np.bool_], seed: int, step: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation in which the rows that are `taken` come last."""
    order = np.random.Generator(np.random.PCG64(derive_seed(seed, "further", step, epoch))).permutation(len(taken))
    return order[np.argsort(taken[order], kind="stable")]


def _source_seed(seed: int, source: int) -> int:
    """Return the seed of a source's permutations: the run's own for the first, so a single file has the run's order."""
    return derive_seed(seed, "source", source) if source else seed
