"""The step plan: the rows of each update, rank and micro-batch, and the exact denominators of each update."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter, model_validator

from schemas.base import Frozen, digest_of
from schemas.packed import PackedInts


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that one rank packs into one forward and backward pass; without rows, a zero-weight dummy."""

    rows: PackedInts  # indices into the batch handle
    num_tokens: int  # prompt + response tokens of the rows; less if a prompt counts once for all rows that share it


_RANKS = TypeAdapter(tuple[tuple[MicroBatch, ...], ...])


class RankPlan(Frozen):
    """The micro-batches of each rank, dummies last. All ranks have the same number, as each one is a collective.

    R ranks, B micro-batches of each, n rows. A large plan has tens of thousands of micro-batches: they are made from
    the packed numbers where they are used, which is a rank's own part.
    """

    rows: PackedInts  # n indices into the batch handle, rank by rank and micro-batch by micro-batch
    micro_rows: PackedInts  # R * B numbers of rows
    micro_tokens: PackedInts  # R * B, prompt + response tokens that are computed, a shared prompt's once
    rank_costs: tuple[NonNegativeFloat, ...]  # R, in units of one token's linear work

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        num_ranks, num_micros = len(self.rank_costs), len(self.micro_rows)
        if not num_ranks or not num_micros or num_micros % num_ranks:
            raise ValueError(
                f"{num_ranks} ranks have {num_micros} micro-batches; all need the same number, at least one"
            )
        if len(self.micro_tokens) != num_micros or sum(self.micro_rows) != len(self.rows):
            raise ValueError(
                f"{num_micros} micro-batches of {sum(self.micro_rows)} rows have {len(self.micro_tokens)} numbers of "
                f"tokens and {len(self.rows)} rows; expected one each"
            )
        return self

    @property
    def ranks(self) -> tuple[tuple[MicroBatch, ...], ...]:
        """The micro-batches of all ranks."""
        micros = self._micros(0, len(self.micro_rows))
        return tuple(micros[at : at + self.num_micros] for at in range(0, len(micros), self.num_micros))

    def rank(self, number: int) -> tuple[MicroBatch, ...]:
        """Return the micro-batches of one rank."""
        return self._micros(number * self.num_micros, (number + 1) * self.num_micros)

    def rank_rows(self, number: int) -> PackedInts:
        """Return the rows of one rank, micro-batch by micro-batch."""
        first, stop = number * self.num_micros, (number + 1) * self.num_micros
        return self.rows[sum(self.micro_rows[:first]) : sum(self.micro_rows[:stop])]

    @property
    def num_micros(self) -> int:
        """The number of micro-batches of each rank, dummies included."""
        return len(self.micro_rows) // len(self.rank_costs)

    @property
    def num_tokens(self) -> int:
        """Prompt + response tokens that are computed."""
        return sum(self.micro_tokens)

    @property
    def num_dummies(self) -> int:
        """The number of micro-batches without rows, over all ranks."""
        return self.micro_rows.count(0)

    @property
    def imbalance(self) -> float:
        """(max - min) / mean of the ranks' costs; 0 is perfect balance."""
        mean = sum(self.rank_costs) / len(self.rank_costs)
        return (max(self.rank_costs) - min(self.rank_costs)) / mean if mean else 0.0

    def _micros(self, first: int, stop: int) -> tuple[MicroBatch, ...]:
        stops = accumulate(self.micro_rows[first:stop], initial=sum(self.micro_rows[:first]))
        parts = zip(pairwise(stops), self.micro_tokens[first:stop], strict=True)
        return tuple(MicroBatch(self.rows[start:end], num_tokens) for (start, end), num_tokens in parts)


class UpdatePlan(RankPlan):
    """One optimizer step: the micro-batches of its ranks, and the denominators of its loss."""

    num_loss_tokens: PositiveInt  # over all ranks
    num_live_sequences: PositiveInt  # sequences with at least one loss token, over all ranks
    num_observation_tokens: NonNegativeInt = 0  # their response tokens without loss, which are an environment's

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, stored: Any) -> Any:
        """Return what version 0.2 stored, a list of micro-batches for each rank, as this version does."""
        if not isinstance(stored, dict) or "ranks" not in stored:
            return stored
        micros = list(chain(*_RANKS.validate_python(stored["ranks"])))
        packed = {
            "rows": PackedInts(chain(*(micro.rows for micro in micros))),
            "micro_rows": PackedInts(len(micro.rows) for micro in micros),
            "micro_tokens": PackedInts(micro.num_tokens for micro in micros),
        }
        return packed | {name: value for name, value in stored.items() if name != "ranks"}


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
    num_steps: PositiveInt | None = None  # the run's, when the step was planned, for that schedule; 0.3.0 stored none

    @property
    def digest(self) -> str:
        """The digest of who computes what: without `num_steps`, so that a longer run has the same plans."""
        return digest_of(self.model_dump_json(exclude={"num_steps"}))

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
    fill = plan.num_tokens / (len(plan.rank_costs) * plan.num_micros * token_budget)
    counts = _counts(len(plan.rank_costs), plan.num_micros, len(plan.rows), plan.num_tokens)
    return (*counts, f"{fill:.1%}", *_counts(plan.num_dummies), f"{plan.imbalance:.3%}")


def _counts(*numbers: int) -> tuple[str, ...]:
    return tuple(f"{number:,}" for number in numbers)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format the header and the lines as a table with right-aligned columns."""
    rows = [header, *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
