"""Which row each prompt of each step is: a function of config and step, so that a resumed run needs no cursor.

K sources, one after the other in one numbering of rows; P prompts in a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from rl_core.rollout.seeding import derive_seed


@dataclass(frozen=True)
class RowOrder:
    """The order of the rows of K weighted sources.

    Prompts are numbered over the whole run: prompt i of step k is number k P + i. Source 0 takes those numbers n at
    which the count floor(n w_0) grows, w_0 being its weight over all weights; the next sources share what it leaves in
    the same way. So a source's share of the first n prompts, for every n, and of any run of n prompts, is its weight to
    within K / n, with no randomness. Within itself each source goes through epochs, each a permutation of all its rows.

    Attributes:
        sizes: K, rows of each source, at least 1.
        weights: K, positive; only their ratios count.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    def rows_for_step(self, step: int, num_prompts: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
        """Return the rows that `step` (from 0) takes: int64 [num_prompts]; see `PromptDataset.rows_for_step`."""
        numbers = np.arange(step * num_prompts, (step + 1) * num_prompts, dtype=np.int64)
        return self._rows_at(numbers, seed, shuffle)

    def rows_for_groups(
        self, step: int, groups: Sequence[int], num_prompts: int, seed: int, shuffle: bool
    ) -> NDArray[np.int64]:
        """Return the row of each of the step's `groups`: int64 [G]; see `PromptDataset.rows_for_groups`."""
        wanted = np.asarray(groups, dtype=np.int64)
        if not shuffle:
            return self._rows_at(step * num_prompts + wanted, seed, shuffle)
        own = self.rows_for_step(step, num_prompts, seed, shuffle)
        num_further = max(0, int(wanted.max(initial=-1)) + 1 - num_prompts)
        return np.concatenate([own, self._further_rows(step, num_further, own, seed)])[wanted]

    def _rows_at(self, numbers: NDArray[np.int64], seed: int, shuffle: bool) -> NDArray[np.int64]:
        sources, places = self._split(numbers)
        rows = np.empty_like(numbers)
        for source, (start, size) in enumerate(zip(self._starts, self.sizes, strict=True)):
            mine = sources == source
            order_of = (
                partial(_epoch_order, size, _source_seed(seed, source)) if shuffle else partial(_file_order, size)
            )
            rows[mine] = start + _take(places[mine], size, order_of)
        return rows

    def _further_rows(self, step: int, count: int, own: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """The rows of the first `count` groups after the step's own, whose rows are `own`: int64 [count].

        Sources go on alternating as they would in the next step; each starts with those of its rows that the step
        doesn't have.
        """
        sources, _ = self._split(len(own) * (step + 1) + np.arange(count, dtype=np.int64))
        rows = np.empty_like(sources)
        for source, (start, size) in enumerate(zip(self._starts, self.sizes, strict=True)):
            mine = sources == source
            taken = np.isin(np.arange(start, start + size), own)
            order_of = partial(_further_order, taken, _source_seed(seed, source), step)
            rows[mine] = start + _take(np.arange(mine.sum()), size, order_of)
        return rows

    def _split(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each prompt number, and how many smaller numbers have it: int64, both as `numbers`."""
        placed = [self._place(int(number)) for number in numbers]
        sources, places = np.array(placed, dtype=np.int64).reshape(-1, 2).T
        return sources, places

    def _place(self, number: int) -> tuple[int, int]:
        for source, (part, whole) in enumerate(self._shares):
            before = number * part // whole
            if (number + 1) * part // whole > before:
                return source, before
            number -= before
        raise AssertionError("the last source takes all that the others leave")

    @cached_property
    def _shares(self) -> tuple[tuple[int, int], ...]:
        """Each source's share of what the sources before it leave, as a ratio of integers; the last one's is 1."""
        weights = [Fraction(str(weight)) for weight in self.weights]  # the decimal that was written: 0.1 is 1/10
        shares = [weight / sum(weights[source:]) for source, weight in enumerate(weights)]
        return tuple((share.numerator, share.denominator) for share in shares)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The first row of each source."""
        return tuple(int(start) for start in np.cumsum([0, *self.sizes[:-1]]))


def _take(places: NDArray[np.int64], size: int, order_of: Callable[[int], NDArray[np.int64]]) -> NDArray[np.int64]:
    """The rows at `places` of the epochs of `size` rows that follow one another, `order_of` the epoch's number each."""
    epochs, within = np.divmod(places, size)
    rows = np.empty_like(places)
    for epoch in np.unique(epochs):
        rows[epochs == epoch] = order_of(int(epoch))[within[epochs == epoch]]
    return rows


def _file_order(size: int, epoch: int) -> NDArray[np.int64]:
    return np.arange(size, dtype=np.int64)


def _epoch_order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size)


def _further_order(taken: NDArray[np.bool_], seed: int, step: int, epoch: int) -> NDArray[np.int64]:
    """A permutation with the rows that are `taken` last."""
    order = np.random.Generator(np.random.PCG64(derive_seed(seed, "further", step, epoch))).permutation(len(taken))
    return order[np.argsort(taken[order], kind="stable")]


def _source_seed(seed: int, source: int) -> int:
    """The seed of a source's permutations: the run's own for the first, so that one file alone has the run's order."""
    return derive_seed(seed, "source", source) if source else seed
