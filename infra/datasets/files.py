"""Find the files of prompt data that a path names, and read their rows."""

import glob
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from infra.datasets.arrow_files import read_parquet, read_stream, saved_shards
from infra.datasets.columns import CONVERSION, ColumnChoice, known_columns
from infra.datasets.text_files import read_csv, read_json, read_jsonl
from schemas.errors import DataError

Row = dict[str, Any]

READERS: dict[str, Callable[[Path, ColumnChoice], Iterator[Row]]] = {
    ".parquet": read_parquet,
    ".arrow": read_stream,
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".json": read_json,
    ".json.gz": read_json,
    ".csv": read_csv,
    ".csv.gz": read_csv,
}
SHARDS = (".parquet", ".jsonl", ".jsonl.gz")  # what a folder is read from

_PANDAS = {  # what reads other kinds
    ".tsv": "read_csv({path!r}, sep='\\t')",
    ".xlsx": "read_excel({path!r})",
    ".feather": "read_feather({path!r})",
    ".orc": "read_orc({path!r})",
}
_HELD_OUT = {"test", "val", "valid", "validation", "dev", "heldout", "holdout"}  # words in files' names
_HUB_ID = re.compile(r"[\w-]+/[\w.-]+")


def read_rows(path: str, choose: ColumnChoice = known_columns) -> Iterator[Row]:
    """Yield the rows at `path` as JSON values; those of several files one after another, see `data_files`.

    Args:
        path: The path.
        choose: Chooses the columns of a file that are read, if it names its columns first.

    Raises:
        DataError: The path doesn't exist, can't be read, or lacks a column.
    """
    return chain.from_iterable(READERS[_ending(file)](file, choose) for file in data_files(path))


def data_files(path: str) -> list[Path]:
    """Return the files that hold the rows at `path`, in their order.

    Args:
        path: A file of one of the kinds of `READERS`; a folder of Parquet or JSONL shards of one split; a pattern such
            as `data/train-*.parquet`; or a folder that `save_to_disk` of Hugging Face datasets wrote, of one dataset or
            of one split of a `DatasetDict`. Files of a pattern or a folder are sorted by name.

    Raises:
        DataError: There is none, it is of another kind, or a shard is missing.
    """
    place = Path(path)
    if place.is_dir():
        is_saved = any((place / name).is_file() for name in ("state.json", "dataset_dict.json"))
        return saved_shards(place) if is_saved else _folder_shards(place)
    if place.is_file():
        files = [place]
    elif not (files := sorted(Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file())):
        raise DataError(_missing(path))
    for file in files:
        if _ending(file) not in READERS:
            raise DataError(_unknown_kind(file))
    return files


def _folder_shards(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if _is_shard(file))
    if not files:
        within = sorted({file.parent for file in folder.glob("*/*") if _is_shard(file)})
        hint = f"; give one of its subfolders: {', '.join(map(str, within[:5]))}" if within else ""
        raise DataError(
            f"{folder} has no {' or '.join(SHARDS[:2])} files, and has neither state.json nor dataset_dict.json of "
            f"save_to_disk{hint or '; give a folder of such files, or one file'}"
        )
    patterns = sorted({f"{folder}/{_prefix(file)}*{_ending(file)}" for file in files})
    if len(patterns) > 1:  # `train.parquet` and `test.parquet`, say, must not be mixed
        raise DataError(f"{folder} has files of several names; give one of them, or a pattern: {', '.join(patterns)}")
    names = {bool(_words(file) & _HELD_OUT): file.name for file in files}
    if len(names) > 1:  # `gsm8k-train.parquet` and `gsm8k-test.parquet`, say
        raise DataError(
            f"{folder} has files of several splits, such as {names[False]} and {names[True]}; give one of them, or a "
            "pattern"
        )
    _require_all_shards(folder, files)
    return files


def _require_all_shards(folder: Path, files: Sequence[Path]) -> None:
    found = [re.search(r"(\d+)-of-(\d+)", file.name) for file in files]
    numbers = {int(each[1]) for each in found if each}
    for count in {int(each[2]) for each in found if each}:
        if missing := sorted(set(range(count)) - numbers):
            raise DataError(f"{folder} lacks shard {missing[0]} of {count}, of {files[0].name}; copy the whole folder")


def _is_shard(file: Path) -> bool:
    return _ending(file) in SHARDS and not file.name.startswith((".", "_")) and file.is_file()


def _prefix(file: Path) -> str:
    """Return the letters that a file's name begins with: `train` of `train-00000-of-00002.parquet`."""
    return re.match(r"[^\W\d]*", file.name.removesuffix(_ending(file)))[0]  # type: ignore[index]  # it always matches


def _words(file: Path) -> set[str]:
    """Return the words in a file's name: `gsm`, `k` and `test` of `gsm8k_test-0.jsonl`."""
    return set(re.findall(r"[^\W\d_]+", file.name.removesuffix(_ending(file)).lower()))


def _ending(file: Path) -> str:
    """Return what tells a file's kind: the last suffix, or the last two of a compressed one."""
    return "".join(file.suffixes[-2:] if file.suffix == ".gz" else file.suffixes[-1:]).lower()


def _missing(path: str) -> str:
    if "://" in path:
        return f"{path}: data is read from local files; download it, and give the path of the copy"
    if glob.has_magic(path):
        return f"{path}: no file matches this pattern; check data.train_path, data.sources and data.eval_path"
    hint = "check data.train_path, data.sources and data.eval_path"
    if _HUB_ID.fullmatch(path):
        hint += (
            '; a dataset of the Hugging Face hub is saved by: python -c "from datasets import load_dataset; '
            f"load_dataset('{path}', split='train').to_parquet('train.parquet')\""
        )
    return f"{path}: no such file; {hint}"


def _unknown_kind(file: Path) -> str:
    kinds = ", ".join(ending for ending in READERS if not ending.endswith(".gz"))
    if file.suffix in _PANDAS:
        read = _PANDAS[file.suffix].format(path=str(file))
        write = f"to_json({str(file.with_suffix('.jsonl'))!r}, orient='records', lines=True)"
        return f'{file}: unknown kind of data file; convert it: python -c "import pandas; pandas.{read}.{write}"'
    return f"{file}: unknown kind of data file; give one of {kinds} (text also as .gz), {CONVERSION}"
