"""What the columns of one step hold, for people: figures of each, its chunks, how long its rows are, and a few rows.

S sample rows, B bins.
"""

from schemas.base import Frozen
from schemas.catalog import Axis


class ColumnFigures(Frozen):
    """What one column holds in a batch's rows. Minimum, mean and maximum leave nulls and non-finite values out."""

    num_rows: int
    num_values: int  # on a jagged axis, of all rows together
    num_bytes: int  # of these rows in Arrow
    num_nulls: int
    num_nonfinite: int  # NaN or infinite
    minimum: float | None = None  # None for text, and where there is no value
    mean: float | None = None
    maximum: float | None = None


class ColumnSummary(Frozen):
    """One column of a step."""

    name: str
    stage: str  # that put it
    group: int  # columns of one group lie in the same chunks
    axis: Axis | None  # None where the catalogue of this version has no such column
    dtype: str
    unit: str
    figures: ColumnFigures | None  # None where it can't be read
    error: str | None = None


class ChunkSummary(Frozen):
    """One chunk of a step."""

    key: str
    num_rows: int
    num_bytes: int
    in_batch: bool  # the newest batch has rows of it; its stage is done


class LengthHistogram(Frozen):
    """How long rows are: bin i counts those with edges[i] <= tokens < edges[i + 1]."""

    edges: tuple[int, ...]  # B + 1
    num_rows: tuple[int, ...]  # B


class SampleRow(Frozen):
    """One row, as far as its columns are there; what is not there, or null, is None."""

    row: int
    prompt_tokens: int
    response_tokens: int
    group_id: int | None
    prompt_text: str | None
    response_text: str | None
    answer: str | None
    finish_reason: str | None
    reward: float | None
    reward_parts: dict[str, float | None]
    advantages: float | None
    mean_logprobs: dict[str, float | None]  # column -> mean over the response, nats; None for an empty one


class StepSummary(Frozen):
    """One step of a run."""

    run_id: str
    step: int
    steps: tuple[int, ...]  # all that have columns
    has_batch: bool  # False: its put is not done, and the rows are those of the chunks that are there
    policy_version: int | None  # None: nothing of the step can be read
    num_rows: int
    num_rows_put: int  # before rows were selected
    columns: tuple[ColumnSummary, ...]
    chunks: tuple[ChunkSummary, ...]
    prompt_tokens: LengthHistogram | None  # None for no rows
    response_tokens: LengthHistogram | None
    samples: tuple[SampleRow, ...]  # S, evenly spread over the batch
    errors: tuple[str, ...]  # what can't be read
