"""The inputs of advantage estimators. N rows, G groups; a group is the rows of one prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Parts = Sequence[tuple[float, Floats]]

_NOISE = 1e-12  # absolute, of parts that cancel: 0.1 + 0.2 - 0.3 is 5.6e-17
_ROUNDING = 8 * float(np.finfo(np.float32).eps)  # relative


@dataclass(frozen=True)
class AdvantageInputs:
    """Validated rows of one step; the rows of a group need not be adjacent."""

    rewards: Floats  # [N], finite
    group: Ints  # [N], 0 .. G - 1
    response_lengths: Ints  # [N], tokens
    loss_tokens: Ints  # [N], response tokens that are trained
    parts: Parts = ()  # what the rewards consist of, if estimated one by one

    @classmethod
    def from_rows(
        cls, rewards: Floats, group_ids: Ints, *, response_lengths: Ints, loss_tokens: Ints, parts: Parts = ()
    ) -> "AdvantageInputs":
        """Validate the rows and number their groups.

        Args:
            rewards: [N] finite.
            group_ids: [N] any integers.
            response_lengths: [N] tokens.
            loss_tokens: [N] trained response tokens.
            parts: The weight and the values, [N] finite, of each part of the rewards; none: they are the only part.

        Raises:
            ValueError: The arrays differ in length, a reward isn't finite, or counts are impossible.
        """
        scores = np.asarray(rewards, dtype=np.float64)
        ids, lengths, trained = (
            np.asarray(counts, dtype=np.int64) for counts in (group_ids, response_lengths, loss_tokens)
        )
        if not scores.shape == ids.shape == lengths.shape == trained.shape or scores.ndim != 1:
            raise ValueError(
                "rewards, group_ids, response_lengths and loss_tokens must be 1-D of one length, not"
                f" {scores.shape}, {ids.shape}, {lengths.shape} and {trained.shape}"
            )
        if len(wrong := np.flatnonzero(~np.isfinite(scores))):
            raise ValueError(
                f"row {wrong[0]} has reward {scores[wrong[0]]}, expected a finite one; drop rows whose reward failed"
            )
        if len(wrong := np.flatnonzero((trained < 0) | (trained > lengths))):
            row = int(wrong[0])
            raise ValueError(
                f"row {row} has {trained[row]} loss tokens, expected from 0 to its {lengths[row]} response tokens"
            )
        return cls(scores, number_groups(ids), lengths, trained, parts)

    @property
    def group_sizes(self) -> Ints:
        """[G] number of rows in each group."""
        return np.bincount(self.group)

    @property
    def centered(self) -> Floats:
        """[N] rewards minus the mean of their group; exactly 0 where the group's are equal."""
        centered = self.rewards - (np.bincount(self.group, weights=self.rewards) / self.group_sizes)[self.group]
        return np.where(self.zero_variance, 0.0, centered)

    @property
    def zero_variance(self) -> NDArray[np.bool_]:
        """[N] whether all rewards of the row's group, or all values of each part, are equal; true for a single row.

        It compares the extremes, because the mean of n equal floats isn't always that float, so that their computed
        variance may not be 0.
        """
        columns = [values for _, values in self.parts] or [self.rewards]
        equal = [find_equal(column, self.group, len(self.group_sizes)) for column in columns]
        is_equal: NDArray[np.bool_] = np.logical_and.reduce(equal)
        return is_equal[self.group]


def number_groups(ids: Ints) -> Ints:
    """Number groups from 0 in the order of their ids: [N] any integers to [N] 0 .. G - 1."""
    low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
    if high - low > 4 * len(ids):  # far apart, so that they are sorted
        return np.unique(ids, return_inverse=True)[1].astype(np.int64)
    numbers: Ints = np.cumsum(np.bincount(ids - low) > 0) - 1
    return numbers[ids - low]


def find_equal(rewards: Floats, group: Ints, num_groups: int) -> NDArray[np.bool_]:
    """Return whether all rewards of each group are equal, [G], up to the rounding of float32 sums.

    True for a group of one row or none. Rewards like 1 and 0.99999994 are sums of the same parts in another order:
    normalized, their difference would be as large as that of right and wrong. The same holds for 0 and 5.6e-17, the sum
    of parts that cancel.

    Args:
        rewards: [N].
        group: [N], 0 .. G - 1.
        num_groups: G.
    """
    lowest, highest = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(lowest, group, rewards)
    np.maximum.at(highest, group, rewards)
    largest = np.maximum(np.abs(lowest), np.abs(highest))
    is_equal: NDArray[np.bool_] = highest - lowest <= np.maximum(_ROUNDING * largest, _NOISE)
    return is_equal
