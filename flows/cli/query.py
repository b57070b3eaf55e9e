"""The results of `sluice sql`: in the terminal, as a file or as a chart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from flows.cli.inspect import shorten
from flows.cli.terminal import plain_table, with_width
from schemas.errors import QueryError

MAX_CELL = 200  # characters
MAX_SERIES = 20  # lines of a chart


def print_result(console: Console, table: pa.Table, num_rows: int, *, as_json: bool) -> None:
    """Print the first rows of a query's result."""
    if as_json:
        print(json.dumps(table.to_pylist(), default=str))
        return
    shown = plain_table(*map(escape, table.column_names), left=table.num_columns)
    for column, field in zip(shown.columns, table.schema, strict=True):
        column.justify = "right" if _is_number(field.type) else "left"
    for row in table.slice(0, num_rows).to_pylist():
        shown.add_row(*(Text(_cell(value)) for value in row.values()))
    with_width(console).print(shown)
    if table.num_rows > num_rows:
        console.print(f"{table.num_rows - num_rows:,} more rows: --rows {table.num_rows}, or write all with --out")


def write_result(table: pa.Table, path: Path, title: str) -> Path:
    """Write a query's result in the format of the file's ending.

    Raises:
        QueryError: There is no such format, or the result can't be drawn.
    """
    writers: dict[str, Callable[[pa.Table, Path, str], None]] = {
        ".parquet": _write_parquet,
        ".csv": _write_csv,
        ".json": lambda table, path, _: _write_text(path, json.dumps(table.to_pylist(), default=str)),
        ".html": _write_chart,
    }
    if path.suffix not in writers:
        raise QueryError(f"{path}: no such format; the file must end in {', '.join(writers)}")
    writers[path.suffix](table, path, title)
    return path


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return shorten(str(value), MAX_CELL)[1:-1]


def _write_parquet(table: pa.Table, path: Path, title: str) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, path)


def _write_csv(table: pa.Table, path: Path, title: str) -> None:
    import pyarrow.csv

    try:
        pyarrow.csv.write_csv(table, path)
    except pa.ArrowException as error:
        raise QueryError(f"{path}: the result can't be CSV: {error}; write .parquet or .json") from None


def _write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n")


def _write_chart(table: pa.Table, path: Path, title: str) -> None:
    """Draw each numeric column over the first one; texts in the other columns name the lines."""
    from flows.report.charts import Line, line_chart
    from flows.report.page import Panel, write_page

    x, *others = table.column_names
    numeric = [name for name in others if _is_number(table.schema.field(name).type)]
    labels = [name for name in others if pa.types.is_string(table.schema.field(name).type)]
    if not numeric or not _is_number(table.schema.field(x).type):
        raise QueryError(f"{path}: a chart needs numbers in the first column, such as the step, and in another one")
    series: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        series.setdefault(" ".join(str(row[name]) for name in labels), []).append(row)
    if len(series) > MAX_SERIES:
        raise QueryError(f"{path}: {len(series)} lines are too many for a chart, which has at most {MAX_SERIES}")
    charts = [
        line_chart(
            name,
            [
                Line(label or name, [row[x] for row in rows], [row[name] for row in rows], has_markers=len(rows) < 50)
                for label, rows in series.items()
            ],
        )
        for name in numeric
    ]
    write_page(str(path), "query", title, (), [Panel(f"by {x}", charts=charts)])


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
