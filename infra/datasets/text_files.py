"""Read rows of text: JSONL, arrays of JSON, and CSV, each also compressed by gzip."""

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from infra.datasets.columns import ColumnChoice
from schemas.errors import DataError


def read_jsonl(file: Path, choose: ColumnChoice) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file with one JSON object per line.

    Raises:
        DataError: It can't be read, or a line is no object.
    """
    # Not pyarrow's reader: it needs one schema for all rows, fills gaps with nulls, and doesn't name the bad line.
    with _open(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                raise DataError(f"{file}, row {number}: the line is blank; remove it")
            yield _require_object(file, number, _parse(f"{file}, row {number}", line, "write one JSON object per line"))


def read_json(file: Path, choose: ColumnChoice) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON array of objects, or of a file with one object per line.

    Raises:
        DataError: See `read_jsonl`.
    """
    with _open(file) as lines:
        is_array = next((line for line in lines if line.strip()), "").lstrip().startswith("[")
    if not is_array:
        yield from read_jsonl(file, choose)
        return
    with _open(file) as text:
        rows = _parse(str(file), text.read(), "write one array of objects, or one object per line")
    for number, row in enumerate(rows, start=1):
        yield _require_object(file, number, row)


def read_csv(file: Path, choose: ColumnChoice) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV file whose first line names the columns; cells are text, and None if they are empty.

    Raises:
        DataError: It can't be read, lacks a column, or a row has more or fewer cells than the first line.
    """
    csv.field_size_limit(sys.maxsize)  # a cell may be as long as a value in the other kinds of files
    with _open(file, newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            choose(str(file), reader.fieldnames or ())
            for number, row in enumerate(reader, start=1):
                if None in row or None in row.values():
                    raise DataError(
                        f"{file}, row {number}: it has more or fewer cells than the {len(reader.fieldnames or ())} "
                        "columns of the first line; quote cells that have a comma"
                    )
                yield {name: cell or None for name, cell in row.items()}
        except csv.Error as error:
            raise DataError(f"{file}, line {reader.line_num}: not CSV: {error}; quote its cells as CSV does") from error


@contextmanager
def _open(file: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Open a text in UTF-8, which may begin with a byte order mark and be compressed."""
    try:
        if file.suffix.lower() == ".gz":
            with gzip.open(file, "rt", encoding="utf-8-sig", newline=newline) as text:
                yield text
        else:
            with open(file, encoding="utf-8-sig", newline=newline) as text:
                yield text
    except UnicodeDecodeError as error:
        raise DataError(f"{file} can't be read as UTF-8 text: {error}; convert it to UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} can't be read: {error}; is it damaged, or not what its name says?") from error


def _parse(place: str, text: str, advice: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
        what = "not JSON" if isinstance(error, json.JSONDecodeError) else "its JSON can't be read"
        raise DataError(f"{place}: {what}: {_cause(error)}; {advice}") from error


def _cause(error: Exception) -> str:
    # Python's own advice, to raise a limit in the program, is none for who has the file.
    return "a number has too many digits" if "sys.set_int_max_str_digits" in str(error) else str(error)


def _require_object(file: Path, number: int, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{file}, row {number}: expected a JSON object, found {type(row).__name__}")
    return row
