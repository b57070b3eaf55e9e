"""The step plan: which rows make up each update, rank and micro-batch, and the update's exact denominators."""

from pydantic import NonNegativeInt, PositiveInt

from schemas.base import Frozen


class MicroBatch(Frozen):
    """Rows that one rank packs into one forward and backward; no rows is a zero-weight dummy."""

    rows: tuple[NonNegativeInt, ...]  # indices into the batch handle
    num_tokens: NonNegativeInt  # prompt + response tokens of these rows


class UpdatePlan(Frozen):
    """One optimizer step: per rank equally many micro-batches, and what the loss sums are divided by."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    num_loss_tokens: PositiveInt  # over all ranks
    num_live_sequences: PositiveInt  # sequences with at least one loss token, over all ranks

    @property
    def rows(self) -> tuple[int, ...]:
        """All rows of the update, rank by rank."""
        return tuple(row for rank in self.ranks for micro in rank for row in micro.rows)


class StepPlan(Frozen):
    """All updates of one step. Computed once, on the driver, from lengths alone; no worker plans again."""

    updates: tuple[UpdatePlan, ...]
    token_budget: PositiveInt  # hard: tokens of one micro-batch
    num_ranks: PositiveInt
    seed: int
    num_skipped_rows: NonNegativeInt = 0  # rows without a loss token
