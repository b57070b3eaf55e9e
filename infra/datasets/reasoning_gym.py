"""Rows of reasoning-gym tasks, as Parquet or JSONL in verl's columns (extra `reasoning-gym`)."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infra.datasets.files import read_rows
from infra.datasets.rows import parse_messages
from infra.storage.folder import replacing
from schemas.config.load import parse_value
from schemas.errors import ConfigError, DataError

Row = dict[str, Any]


def write_problems(
    path: Path,
    task: str,
    *,
    size: int,
    seed: int,
    settings: dict[str, Any],
    exclude: Path | None = None,
) -> int:
    """Generate `size` problems of `task`, write them to `path`, and return the number of rows written.

    Columns: `data_source` (the task), `prompt` (chat list), `reward_model.ground_truth`, and `extra_info` with the
    row's index and, as JSON, the metadata that the task's verifier needs.

    Args:
        path: The file, `.parquet` or `.jsonl`.
        task: The name of a reasoning-gym task.
        size: The number of problems to generate.
        seed: The task's seed.
        settings: The task's own settings.
        exclude: Held-out problems, in a form that `read_rows` accepts; generated rows whose prompt is in a text of
            the user in one of theirs, but for white space, are dropped.

    Raises:
        ConfigError: reasoning-gym is not installed, or doesn't know the task or a setting; or `path` ends otherwise.
        DataError: `exclude` can't be read, or contains every generated problem.
    """
    if path.suffix not in _WRITERS:
        raise ConfigError(f"{path}: its name decides what is written; let it end in {' or '.join(_WRITERS)}")
    entries = dict(enumerate(_make_dataset(task, size, seed, settings)))
    questions = {index: _plain_spaces(entry["question"]) for index, entry in entries.items()}
    held_out = _find(set(questions.values()), _questions(exclude)) if exclude else set()
    rows = [_row(task, index, entry) for index, entry in entries.items() if questions[index] not in held_out]
    if not rows:
        raise DataError(f"{exclude} contains all {size} generated problems; generate more, or use another seed")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        _WRITERS[path.suffix](rows, temporary)
    return len(rows)


def _make_dataset(task: str, size: int, seed: int, settings: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError("reasoning-gym is not installed; pip install 'sluice-rl[reasoning-gym]'") from None
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym task {task!r} with {settings}: {error}") from None


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` pairs, with values as those of a config's overrides; see `parse_value`.

    Raises:
        ConfigError: A pair has no `=`, or a value that may be meant in two ways.

    Example:
        >>> parse_settings(["min_terms=2", "allow_negation=False", "operators=('+', '-')"])
        {'min_terms': 2, 'allow_negation': False, 'operators': ('+', '-')}
    """
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"setting {setting!r} is not of the form key=value, e.g. min_terms=2")
        parsed[key] = parse_value(text, [Any], setting)
    return parsed


def _questions(path: Path) -> str:
    """Return the texts of the user in a file's prompts, of which any may have a problem: a line each."""
    rows = enumerate(read_rows(str(path)), start=1)
    prompts = (parse_messages(f"{path}, row {number}", row.get("prompt")) for number, row in rows)
    texts = (message["content"] for prompt in prompts for message in prompt if message["role"] == "user")
    return "\n".join(dict.fromkeys(map(_plain_spaces, texts)))


def _find(questions: set[str], text: str) -> set[str]:
    """Return the questions that are in a text, and not as a part of other words or numbers."""
    lengths = sorted({len(question) for question in questions})
    starts = (found.start() for found in re.finditer(r"(?<!\w)\S", text))
    parts = ((at + length, text[at : at + length]) for at in starts for length in lengths)
    return {part for end, part in parts if part in questions and not re.match(r"\w", text[end : end + 1])}


def _plain_spaces(text: str) -> str:
    return " ".join(text.split())


def _write_parquet(rows: Sequence[Row], path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def _write_jsonl(rows: Sequence[Row], path: Path) -> None:
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")


_WRITERS: dict[str, Callable[[Sequence[Row], Path], None]] = {".parquet": _write_parquet, ".jsonl": _write_jsonl}


def _row(task: str, index: int, entry: dict[str, Any]) -> Row:
    return {
        "data_source": task,
        "prompt": [{"role": "user", "content": entry["question"]}],
        "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
        "extra_info": {"index": index, "metadata": json.dumps(entry["metadata"], default=str)},
    }
