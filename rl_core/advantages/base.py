"""What every advantage estimator takes. N rows, G groups; a group holds the rows that answer one prompt."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class AdvantageInputs:
    """Checked rows of one step; the rows of a group need not be adjacent."""

    rewards: Floats  # [N], finite
    group: Ints  # [N], 0 .. G - 1
    response_lengths: Ints  # [N], tokens
    loss_tokens: Ints  # [N], response tokens that are trained

    @classmethod
    def of(cls, rewards: Floats, group_ids: Ints, *, response_lengths: Ints, loss_tokens: Ints) -> "AdvantageInputs":
        """Check the rows, and number their groups.

        Args:
            rewards: [N] finite.
            group_ids: [N] any integers.
            response_lengths: [N] tokens.
            loss_tokens: [N] of these, the trained ones.

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
            raise ValueError(f"row {wrong[0]} has reward {scores[wrong[0]]}; leave out rows whose reward failed")
        if len(wrong := np.flatnonzero((trained < 0) | (trained > lengths))):
            row = int(wrong[0])
            raise ValueError(f"row {row} has {trained[row]} loss tokens among {lengths[row]} response tokens")
        return cls(scores, np.unique(ids, return_inverse=True)[1].astype(np.int64), lengths, trained)

    @property
    def group_sizes(self) -> Ints:
        """[G] rows of each group."""
        return np.bincount(self.group)

    @property
    def centred(self) -> Floats:
        """[N] rewards less their group's mean."""
        return self.rewards - (np.bincount(self.group, weights=self.rewards) / self.group_sizes)[self.group]

    @property
    def zero_variance(self) -> NDArray[np.bool_]:
        """[N] whether all rewards of the row's group are equal, as those of one row are.

        The mean of n equal floats isn't always that float: a variance of 0 wouldn't do as the test.
        """
        num_groups = len(self.group_sizes)
        lowest, highest = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
        np.minimum.at(lowest, self.group, self.rewards)
        np.maximum.at(highest, self.group, self.rewards)
        flat: NDArray[np.bool_] = (lowest == highest)[self.group]
        return flat


AdvantageEstimator = Callable[..., Floats]  # (AdvantageInputs, its config) -> [N]
