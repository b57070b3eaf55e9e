"""The step plan: the rows of each update, rank and micro-batch, and the exact denominators of each update."""

from collections.abc import Iterable, Sequence
from typing import Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from schemas.base import Frozen


class MicroBatch(Frozen):
    """Rows that one rank packs into one forward and backward pass; without rows, a zero-weight dummy."""

    rows: tuple[NonNegativeInt, ...]  # indices into the batch handle
    num_tokens: NonNegativeInt  # prompt + response tokens of the rows


class RankPlan(Frozen):
    """The micro-batches of each rank, dummies last. All ranks have the same number, as each one is a collective."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    rank_costs: tuple[NonNegativeFloat, ...]  # of each rank, in units of one token's linear work

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        counts = sorted({len(rank) for rank in self.ranks})
        if len(counts) != 1 or counts == [0]:
            raise ValueError(f"ranks have {counts} micro-batches; all need the same number, at least one")
        if len(self.rank_costs) != len(self.ranks):
            raise ValueError(f"{len(self.rank_costs)} costs were given for {len(self.ranks)} ranks; expected one each")
        return self

    @property
    def rows(self) -> tuple[int, ...]:
        """All rows, rank by rank."""
        return tuple(row for micro in self._micros for row in micro.rows)

    @property
    def num_micros(self) -> int:
        """The number of micro-batches of each rank, dummies included."""
        return len(self.ranks[0])

    @property
    def num_tokens(self) -> int:
        """Prompt + response tokens of all rows."""
        return sum(micro.num_tokens for micro in self._micros)

    @property
    def num_dummies(self) -> int:
        """The number of micro-batches without rows, over all ranks."""
        return sum(not micro.rows for micro in self._micros)

    @property
    def imbalance(self) -> float:
        """(max - min) / mean of the ranks' costs; 0 is perfect balance."""
        mean = sum(self.rank_costs) / len(self.rank_costs)
        return (max(self.rank_costs) - min(self.rank_costs)) / mean if mean else 0.0

    @property
    def _micros(self) -> Iterable[MicroBatch]:
        return (micro for rank in self.ranks for micro in rank)


class UpdatePlan(RankPlan):
    """One optimizer step: the micro-batches of its ranks, and the denominators of its loss."""

    num_loss_tokens: PositiveInt  # over all ranks
    num_live_sequences: PositiveInt  # sequences with at least one loss token, over all ranks


class StepPlan(Frozen):
    """All updates of one step, planned once, on the driver, from lengths alone; workers only follow the plan.

    A plan is a value: it is hashable, survives a round trip through JSON, and prints as a table.
    """

    updates: tuple[UpdatePlan, ...]
    token_budget: PositiveInt  # hard limit on the tokens of a micro-batch
    num_ranks: PositiveInt
    seed: int
    num_skipped_rows: NonNegativeInt = 0  # rows without a loss token
    lr_scale: PositiveFloat = 1.0  # the factor on the scheduled learning rate

    def __str__(self) -> str:
        header = ("update", *_HEADER, "loss tokens", "sequences")
        lines = [
            (str(at), *_cells(update, self.token_budget), *_counts(update.num_loss_tokens, update.num_live_sequences))
            for at, update in enumerate(self.updates)
        ]
        title = f"token budget {self.token_budget:,}, seed {self.seed}, {self.num_skipped_rows:,} rows skipped"
        return f"{title}\n{_table(header, lines)}"


class ForwardPlan(RankPlan):
    """One forward pass over all rows of a batch without training, such as scoring log-probs."""

    token_budget: PositiveInt  # hard limit on the tokens of a micro-batch

    def __str__(self) -> str:
        return f"token budget {self.token_budget:,}\n{_table(_HEADER, [_cells(self, self.token_budget)])}"


_HEADER = ("ranks", "micro-batches", "rows", "tokens", "fill", "dummies", "imbalance")


def _cells(plan: RankPlan, token_budget: int) -> tuple[str, ...]:
    """Format the columns of `_HEADER`; micro-batches are per rank, and the imbalance is that of the ranks' costs."""
    fill = plan.num_tokens / (len(plan.ranks) * plan.num_micros * token_budget)
    counts = _counts(len(plan.ranks), plan.num_micros, len(plan.rows), plan.num_tokens)
    return (*counts, f"{fill:.1%}", *_counts(plan.num_dummies), f"{plan.imbalance:.3%}")


def _counts(*numbers: int) -> tuple[str, ...]:
    return tuple(f"{number:,}" for number in numbers)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format the header and the lines as a table with right-aligned columns."""
    rows = [header, *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
