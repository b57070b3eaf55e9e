"""What a run was given and goes on with: digests of it, in `inputs.json`; and of `[sft]`, the encoded rows, in `rows/`.

The rows of supervised fine-tuning are encoded once, by the run's driver, and every process maps them. A file of them is
written before the record that names what they were made from and their checksum: one without a record doesn't count.
"""

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from datetime import date
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import xxhash
from pydantic import Field, NonNegativeInt, PositiveInt

from infra.storage.folder import read_record
from infra.storage.runs import RunDirectory
from schemas.base import Frozen, digest_of
from schemas.config.reward import reward_models, user_functions
from schemas.config.run import RunConfig
from schemas.errors import RunError

if TYPE_CHECKING:
    import pyarrow as pa

    from infra.datasets.sft import SftDataset

logger = logging.getLogger(__name__)

RowSet = Literal["train", "held-out"]
_NAME = "inputs.json"
_ROWS = "rows"
_KEPT = 4  # sets of rows that this process has encoded, and no run keeps yet
_encoded: "dict[str, SftDataset]" = {}  # by fingerprint: the check of a run encodes rows before it has a directory
_BLOCK_BYTES = 2**20
_TOKENIZER_FILES = (  # of a model's folder; on them, the tokens of prompts and the ends of responses depend
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "generation_config.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)


class GivenModel(Frozen):
    """A model folder that a run was given."""

    folder: str  # without links
    weights: str  # see `infra.models.files.weights_digest`


class RunInputs(Frozen):
    """What a run was given besides its config."""

    data: dict[str, str]  # the digest of the files of each path
    tokenizer: str = ""  # the digest of the model folder's files of it; empty: the model is on the hub
    models: dict[str, GivenModel] = Field(default_factory=dict)  # by path; earlier versions of Sluice lack it
    code: dict[str, str]  # the digest of the source of each module of rewards and environments


def with_date(config: RunConfig) -> RunConfig:
    """Return the config that a new run is given: if a chat template asks for the date, with today's, which stays."""
    from infra.models.load import load_tokenizer  # here: transformers and torch are imported with these
    from rl_core.rewards.model import load_reward_tokenizer
    from rl_core.rollout.chat import uses_clock

    tokenizers = chain([load_tokenizer(config.model)], map(load_reward_tokenizer, reward_models(config.reward)))
    if config.data.date is not None or not any(map(uses_clock, tokenizers)):
        return config
    return config.replace(data=config.data.with_date(date.today().isoformat()))


def record_inputs(directory: RunDirectory, config: RunConfig) -> None:
    """Record what a run is given.

    Raises:
        DataError: There are no such data files.
    """
    from infra.models.files import weights_digest  # here: torch is imported with it

    digests = {path: weights_digest(path) for path in model_paths(config)}
    models = {path: GivenModel(folder=os.path.realpath(path), weights=each) for path, each in digests.items() if each}
    directory.folder.write(_NAME, _measure(config).replace(models=models).model_dump_json(indent=2).encode())


def has_record(directory: RunDirectory) -> bool:
    """Return whether what a run was given is recorded; an older Sluice did not."""
    return directory.folder.size(_NAME) is not None


def model_paths(config: RunConfig) -> list[str]:
    """Return the paths of the models that a run loads."""
    teachers = config.distillation.teachers.values() if config.distillation else ()
    own = [teacher.path for teacher in teachers if teacher.path is not None]
    return [config.model.path, *(model.path for model in reward_models(config.reward)), *own]


def given_folder(directory: RunDirectory, path: str) -> str:
    """Return the folder that a model's path led to when a run was given it; the path itself if that isn't recorded."""
    given = None if (before := _load(directory)) is None else before.models.get(path)
    return path if given is None else given.folder


def check_models(directory: RunDirectory, paths: Iterable[str]) -> None:
    """Check that these paths lead to the models that a run was given; what isn't recorded, or gone, isn't checked.

    Raises:
        RunError: One leads to another model.
    """
    from infra.models.files import weights_digest  # here: torch is imported with it

    before = _load(directory)
    for path in paths:
        given = None if before is None else before.models.get(path)
        if given is not None and weights_digest(path) not in ("", given.weights):
            raise RunError(
                f"{path} is not the model that run {directory.run_id} was given, which was in {given.folder}: restore "
                f"that folder, or the link to it; or, to go on with what is there now, remove {path} from `models` in "
                f"{directory.url}/{_NAME}"
            )


def check_files(directory: RunDirectory, config: RunConfig) -> None:
    """Check that data, models and tokenizer are those that the run was given; one without a record isn't checked.

    Raises:
        RunError: One of them has changed.
        DataError: A data file is gone.
    """
    check_models(directory, model_paths(config))
    if (before := _load(directory)) is None:
        return
    now = _measure(config)
    changed = [f"the data of {path}" for path, digest in now.data.items() if before.data.get(path, digest) != digest]
    if before.tokenizer and before.tokenizer != now.tokenizer:
        changed.append(f"the tokenizer, chat template or generation config of {config.model.path}")
    if changed:
        raise RunError(
            f"run {directory.run_id} can't go on: {changed[0]} is not what it was given, so that it would train on "
            "something else; restore it, or start another run with sluice train"
        )


def check_inputs(directory: RunDirectory, config: RunConfig) -> None:
    """Check data and models, see `check_files`, and warn of modules that are not those that the run was given."""
    check_files(directory, config)
    before, now = _load(directory), code_digests(config)
    for module, digest in now.items():
        if before is not None and before.code.get(module, digest) != digest:
            logger.warning(
                "the module %s has changed since run %s was given it: workers that start from now on use the new one; "
                "if that is not meant, restore it, and resume the run",
                module,
                directory.run_id,
            )


def renew_inputs(directory: RunDirectory, config: RunConfig) -> None:
    """Check what a run goes on with, see `check_inputs`, and record it, if there is a record."""
    check_inputs(directory, config)
    if has_record(directory):
        record_inputs(directory, config)


class _RowsRecord(Frozen):
    """A file of encoded rows."""

    format: Literal[1] = 1  # to be raised when an earlier Sluice can't read what is written, or encodes otherwise
    fingerprint: str  # of data, tokenizer and settings
    checksum: str
    sizes: tuple[PositiveInt, ...]  # rows of each path
    num_dropped: NonNegativeInt


def open_rows(directory: RunDirectory | None, config: RunConfig, rows: RowSet) -> "SftDataset":
    """Return encoded training or held-out rows: the run's own, or those that this process has encoded or encodes now.

    The run's are taken only if they were made from this data, tokenizer and config.

    Args:
        directory: The run; None: it has no directory yet.
        config: Its config, with a section `sft` and, for held-out rows, `data.eval_path`.
        rows: Which rows.

    Raises:
        DataError: See `encode_rows`.
    """
    fingerprint = _fingerprint(config, rows)
    found = None if directory is None else _stored_rows(directory, config, rows, fingerprint)
    return _encode(config, rows, fingerprint) if found is None else found


def keep_rows(directory: RunDirectory, config: RunConfig) -> None:
    """Write the encoded rows of supervised fine-tuning to a run's directory, unless it has them.

    Raises:
        DataError: See `encode_rows`.
    """
    if config.sft is None:
        return
    for rows in _row_sets(config):
        fingerprint = _fingerprint(config, rows)
        if _stored_rows(directory, config, rows, fingerprint) is not None:
            continue
        made, folder = _encode(config, rows, fingerprint), directory.folder.within(_ROWS)
        folder.remove(f"{rows}.json")  # first: a file of rows and a record belong together
        folder.write_large(f"{rows}.arrow", made.content)
        record = _RowsRecord(
            fingerprint=fingerprint,
            checksum=_checksum(made.content),
            sizes=made.sizes,
            num_dropped=made.num_dropped,
        )
        folder.write(f"{rows}.json", record.model_dump_json(indent=2).encode())
        _encoded.pop(fingerprint, None)  # the file without a name, which takes as much of a disk


def _stored_rows(directory: RunDirectory, config: RunConfig, rows: RowSet, fingerprint: str) -> "SftDataset | None":
    """Return the rows that a run keeps; None if it has none that were made from this, or they are damaged."""
    from infra.datasets.sft import SftDataset  # here: transformers is imported with it

    folder, advice = directory.folder.within(_ROWS), "the rows are encoded again"
    try:
        if (record := read_record(folder, f"{rows}.json", _RowsRecord, advice)) is None:
            return None
        if record.fingerprint != fingerprint:
            logger.info("%s has the %s rows of other data, tokenizer or settings: %s", folder.place, rows, advice)
            return None
        content = folder.map_copy(f"{rows}.arrow")
    except (RunError, OSError) as error:
        logger.warning("the %s rows in %s can't be read: %s; %s", rows, folder.place, error, advice)
        return None
    if (checksum := _checksum(content)) != record.checksum:
        logger.warning(
            "%s/%s.arrow is damaged: its checksum is %s, expected %s; %s",
            *(folder.place, rows, checksum, record.checksum, advice),
        )
        return None
    return SftDataset(content, record.sizes, _row_sets(config)[rows][1], record.num_dropped)


def _encode(config: RunConfig, rows: RowSet, fingerprint: str) -> "SftDataset":
    from infra.datasets.sft import encode_rows  # here: transformers is imported with these
    from infra.models.load import load_tokenizer

    if fingerprint not in _encoded:
        made = encode_rows(*_row_sets(config)[rows], config, load_tokenizer(config.model))
        while len(_encoded) >= _KEPT:
            del _encoded[next(iter(_encoded))]  # the oldest
        _encoded[fingerprint] = made
    return _encoded[fingerprint]


def _row_sets(config: RunConfig) -> dict[RowSet, tuple[list[str], list[float]]]:
    """Return the paths of each set of rows, and their weights."""
    data = config.data
    sets: dict[RowSet, tuple[list[str], list[float]]] = {
        "train": ([source.path for source in data.train_sources], [source.weight for source in data.train_sources])
    }
    return sets | ({"held-out": ([data.eval_path], [1.0])} if data.eval_path else {})


def _fingerprint(config: RunConfig, rows: RowSet) -> str:
    """Return a digest of all that the tokens of rows, and their order, depend on."""
    assert config.sft is not None
    values = {
        "data": [(data_digest(path), weight) for path, weight in zip(*_row_sets(config)[rows], strict=True)],
        "tokenizer": tokenizer_digest(config),
        "model": _digest(
            Path(config.model.path).glob("config.json")
        ),  # the number of token ids, and the tokens that end responses
        "settings": config.sft.model_dump(mode="json", include={"max_tokens", "loss_on", "tools"}),
        "overlong": config.data.overlong,
        "template": config.data.model_dump(mode="json", include={"chat_template_kwargs"}),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def _checksum(content: "pa.Buffer") -> str:
    return xxhash.xxh3_128_hexdigest(memoryview(content))


def data_digest(path: str) -> str:
    """Return a digest of the files that hold the rows at a path, in their order.

    Raises:
        DataError: See `data_files`.
    """
    from infra.datasets.files import data_files  # here: transformers is imported with it

    return _digest(data_files(path))


def tokenizer_digest(config: RunConfig) -> str:
    """Return a digest of the model's tokenizer and chat template; of one on the hub, its id."""
    return _tokenizer_digest(Path(config.model.path)) or config.model.path


def evaluation_digest(config: RunConfig) -> str:
    """Return a digest of what an evaluation measures: the held-out rows, and the settings that its figures depend on.

    Raises:
        DataError: See `data_files`.
    """
    settings = config.eval.model_dump(mode="json", exclude={"every_steps", "batch_prompts"})
    return digest_of(json.dumps([config.data.eval_path and data_digest(config.data.eval_path), settings]))


def _measure(config: RunConfig) -> RunInputs:
    return RunInputs(
        data={path: data_digest(path) for path in config.data.paths},
        tokenizer=_tokenizer_digest(Path(config.model.path)),
        code=code_digests(config),
    )


def _load(directory: RunDirectory) -> RunInputs | None:
    return read_record(directory.folder, _NAME, RunInputs, "restore it")


def _tokenizer_digest(folder: Path) -> str:
    files = sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})
    names = " ".join(str(file.relative_to(folder)) for file in files)
    return _digest(files, names) if files else ""


def code_digests(config: RunConfig) -> dict[str, str]:
    """Return the digest of the source of each module of rewards and environments, by its name."""
    files = {module: _module_file(module) for path in _import_paths(config) for module in [path.partition(":")[0]]}
    return {module: _digest([file]) for module, file in sorted(files.items()) if file is not None}


def _import_paths(config: RunConfig) -> Iterator[str]:
    yield from (function.path for function in user_functions(config.reward))
    for environment in config.environments:
        yield from environment.import_paths


def _module_file(module: str) -> Path | None:
    """Return the source of a module, which isn't imported; None if it isn't a file on the module path."""
    for folder in sys.path:
        place = Path(folder, *module.split("."))
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                return file
    return None


def _digest(files: Iterable[Path], names: str = "") -> str:
    digest = xxhash.xxh3_128(names.encode())
    for file in files:
        digest.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as content:
            while block := content.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()
