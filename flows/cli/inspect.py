"""`sluice inspect`: a step's columns in the terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flows.cli.terminal import plain_table, with_width
from schemas.plan import StepPlan
from schemas.summary import ColumnStats, LengthHistogram, SampleRow, StepSummary

BAR_WIDTH = 30
MAX_PROMPT, MAX_RESPONSE = 160, 320  # characters of a sample
UNBOUNDED = 10_000
UNREADABLE = "can't be read"

DETAILS = ("stage", "axis", "dtype", "unit")
FIGURES = ("rows", "values", "bytes", "nulls", "min", "mean", "max")


def print_step(console: Console, summary: StepSummary, plan: StepPlan | None = None) -> None:
    """Print a step: its identity, columns, chunks, plan, length histograms and sample rows."""
    console = with_width(console)
    _print(console, Text("\n".join(_headlines(summary))))
    if summary.columns:
        detailed = _columns(summary, DETAILS)
        width = console.measure(detailed, options=console.options.update(max_width=UNBOUNDED)).maximum
        _print(console, detailed if width <= console.width else _columns(summary, ()))
    if summary.errors:
        _print(console, Text("\n".join(f"{UNREADABLE}: {error}" for error in summary.errors), style="red"))
    if summary.chunks:
        _print(console, _chunks(summary))
    if plan:
        _print(console, Text(f"plan {plan.digest}: {plan}"))
    for title, histogram in (("prompt", summary.prompt_tokens), ("response", summary.response_tokens)):
        if histogram:
            _print(console, _histogram(f"{title} tokens", histogram))
    for sample in summary.samples:
        _print(console, _sample(sample))


def shorten(string: str, limit: int) -> str:
    """Return the start and the end of a string, at most about `limit` characters, quoted, on one line.

    Characters that a terminal would interpret or hide are escaped, since a model can generate anything.
    """
    if len(string) > limit:
        head, tail = string[: limit * 2 // 3], string[-(limit // 3) :]
        return f"{head!r} … {len(string) - len(head) - len(tail):,} more … {tail!r}"
    return repr(string)


def _headlines(summary: StepSummary) -> Iterator[str]:
    version = "" if summary.policy_version is None else f", policy version {summary.policy_version}"
    yield f"run {summary.run_id}, step {summary.step}{version}: {_rows(summary)}"
    yield f"steps with columns: {', '.join(map(str, summary.steps))}"
    if not summary.has_batch:
        yield "the put of this step is not finished: these are its chunks so far"


def _rows(summary: StepSummary) -> str:
    if summary.num_rows == summary.num_rows_put:
        return f"{summary.num_rows:,} rows"
    return f"{summary.num_rows:,} rows, selected from {summary.num_rows_put:,} that were put"


def _columns(summary: StepSummary, details: Sequence[str]) -> Table:
    """Return a table with one line per column: its name, these of its `DETAILS`, and its figures."""
    table = plain_table("column", *details, *FIGURES, left=1 + len(details))
    group = 0
    for column in summary.columns:
        if column.group != group:
            table.add_section()
            group = column.group
        values = {"stage": column.stage, "axis": column.axis or "-", "dtype": column.dtype, "unit": column.unit}
        figures = _figures(column.stats) if column.stats else [UNREADABLE]
        table.add_row(*map(Text, (column.name, *(values[name] for name in details), *figures)))
    return table


def _figures(stats: ColumnStats) -> list[str]:
    """Return the cells of `FIGURES`; the number of non-finite values is added to the nulls."""
    nulls = f"{stats.num_nulls:,}"
    if stats.num_nonfinite:
        nulls += f" + {stats.num_nonfinite:,} non-finite"
    counts = [f"{count:,}" for count in (stats.num_rows, stats.num_values, stats.num_bytes)]
    return [*counts, nulls, *map(_number, (stats.minimum, stats.mean, stats.maximum))]


def _chunks(summary: StepSummary) -> Table:
    table = plain_table("chunk", "rows", "bytes", "", left=1)
    for chunk in summary.chunks:
        remark = "" if chunk.in_batch else "not in the batch"
        table.add_row(Text(chunk.key), f"{chunk.num_rows:,}", f"{chunk.num_bytes:,}", remark)
    return table


def _histogram(title: str, histogram: LengthHistogram) -> Table:
    table = plain_table(title, "rows", "", left=1)
    table.columns[-1].justify = "left"
    most = max(histogram.num_rows)
    for first, stop, count in zip(histogram.edges, histogram.edges[1:], histogram.num_rows, strict=False):
        label = str(first) if stop == first + 1 else f"{first}–{stop - 1}"
        bar = "█" * max(round(count / most * BAR_WIDTH), 1) if count else ""
        table.add_row(label, f"{count:,}", bar)
    return table


def _sample(sample: SampleRow) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for name, value in _sample_lines(sample):
        table.add_row(name, Text(value, overflow="fold"))
    return Group(Text(f"row {sample.row}"), Padding.indent(table, 2))


def _sample_lines(sample: SampleRow) -> Iterator[tuple[str, str]]:
    if sample.prompt_text is not None:
        yield "prompt", shorten(sample.prompt_text, MAX_PROMPT)
    if sample.response_text is not None:
        yield "response", shorten(sample.response_text, MAX_RESPONSE)
    if sample.answer is not None:
        yield "answer", shorten(sample.answer, MAX_PROMPT)
    if sample.failure is not None:
        yield "failure", sample.failure
    scores = {"reward": sample.reward, **sample.reward_parts, "advantages": sample.advantages}
    yield "scores", ", ".join(f"{name} {_number(value)}" for name, value in scores.items())
    if sample.mean_logprobs:
        means = ", ".join(f"{name} {_number(value)}" for name, value in sample.mean_logprobs.items())
        yield "means", f"{means} nat"
    length = f"{sample.prompt_tokens:,} + {sample.response_tokens:,} tokens"
    ends = "" if sample.finish_reason is None else f", finish_reason {shorten(sample.finish_reason, 20)}"
    group = "" if sample.group_id is None else f", group_id {sample.group_id}"
    yield "length", f"{length}{ends}{group}"


def _print(console: Console, part: RenderableType) -> None:
    """Print one part, followed by an empty line."""
    console.print(part, soft_wrap=isinstance(part, Text))
    console.print()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
