"""A summary of one step's columns for users: statistics per column, chunks, row lengths, and a few sample rows.

S sample rows, B bins.
"""

from schemas.base import Frozen
from schemas.catalog import Axis


class ColumnStats(Frozen):
    """Statistics of one column over a batch's rows. Minimum, mean and maximum ignore nulls and non-finite values."""

    num_rows: int
    num_values: int  # on a jagged axis, over all rows
    num_bytes: int  # of these rows in Arrow
    num_nulls: int
    num_nonfinite: int  # NaN or infinite
    minimum: float | None = None  # None for strings, and if the column has no value
    mean: float | None = None
    maximum: float | None = None


class ColumnSummary(Frozen):
    """One column of a step."""

    name: str
    stage: str  # the stage that put it
    group: int  # columns of one group share their chunks
    axis: Axis | None  # None: the catalog of this version has no such column
    dtype: str
    unit: str
    stats: ColumnStats | None  # None: the column can't be read
    error: str | None = None


class ChunkSummary(Frozen):
    """One chunk of a step."""

    key: str
    num_rows: int
    num_bytes: int
    in_batch: bool  # the newest batch has rows of this chunk, so its stage is done


class LengthHistogram(Frozen):
    """A histogram of row lengths: bin i counts the rows with edges[i] <= tokens < edges[i + 1]."""

    edges: tuple[int, ...]  # B + 1
    num_rows: tuple[int, ...]  # B


class SampleRow(Frozen):
    """One row; a missing column or a null is None."""

    row: int
    prompt_tokens: int
    response_tokens: int
    group_id: int | None
    prompt_text: str | None
    response_text: str | None
    answer: str | None
    finish_reason: str | None
    reward: float | None
    failure: str | None = None  # why the reward failed, if that is recorded
    reward_parts: dict[str, float | None]
    advantages: float | None
    mean_logprobs: dict[str, float | None]  # column -> mean over the response, nats; None for an empty response


class StepSummary(Frozen):
    """One step of a run."""

    run_id: str
    step: int
    steps: tuple[int, ...]  # all steps of the run that have columns
    has_batch: bool  # False: the rollout stage has not finished, and the rows are those of the chunks put so far
    policy_version: int | None  # None: nothing of the step can be read
    num_rows: int
    num_rows_put: int  # before rows were dropped
    columns: tuple[ColumnSummary, ...]
    chunks: tuple[ChunkSummary, ...]
    prompt_tokens: LengthHistogram | None  # None: no rows
    response_tokens: LengthHistogram | None
    samples: tuple[SampleRow, ...]  # S, at even distances in the batch
    errors: tuple[str, ...]  # one message per column or chunk that can't be read
