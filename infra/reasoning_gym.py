"""Rows of reasoning-gym tasks, as Parquet in verl's columns (extra `demo`)."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import ConfigError


def write_rows(path: Path, task: str, *, size: int, seed: int, settings: dict[str, Any]) -> None:
    """Generate `size` problems of `task` and write them to `path`.

    Columns: `data_source` (the task), `prompt` (chat list), `reward_model.ground_truth`, and `extra_info` with the
    row's index and, as JSON, the metadata that the task's verifier needs.

    Raises:
        ConfigError: reasoning-gym is not installed, or doesn't know the task or a setting.
    """
    rows = [_row(task, index, entry) for index, entry in enumerate(make_dataset(task, size, seed, settings))]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(pa.Table.from_pylist(rows), temporary)
    os.replace(temporary, path)


def make_dataset(task: str, size: int, seed: int, settings: dict[str, Any]) -> Any:
    """The task's procedural data set.

    Raises:
        ConfigError: reasoning-gym is not installed, or doesn't know the task or a setting.
    """
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError("reasoning-gym is not installed; pip install 'sluice[demo]'") from None
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym task {task!r} with {settings}: {error}") from None


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Read `key=value` pairs; values are JSON, else strings.

    Raises:
        ConfigError: A pair has no `=`.
    """
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"setting {setting!r} is not of the form key=value, e.g. min_terms=2")
        try:
            parsed[key] = json.loads(text)
        except json.JSONDecodeError:
            parsed[key] = text
    return parsed


def _row(task: str, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": task,
        "prompt": [{"role": "user", "content": entry["question"]}],
        "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
        "extra_info": {"index": index, "metadata": json.dumps(entry["metadata"], default=str)},
    }
