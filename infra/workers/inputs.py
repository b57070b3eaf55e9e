"""`inputs.json`: digests of the data, the tokenizer and the modules that a run was given, with which it goes on."""

import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from infra.storage.folder import read_record
from infra.storage.runs import RunDirectory
from schemas.base import Frozen
from schemas.config.reward import FunctionReward, GroupFunctionReward, WeightedReward
from schemas.config.run import RunConfig
from schemas.errors import RunError

logger = logging.getLogger(__name__)

_NAME = "inputs.json"
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


class RunInputs(Frozen):
    """What a run was given besides its config."""

    data: dict[str, str]  # the digest of the files of each path
    tokenizer: str = ""  # the digest of the model folder's files of it; empty: the model is on the hub
    code: dict[str, str]  # the digest of the source of each module of rewards and environments


def record_inputs(directory: RunDirectory, config: RunConfig) -> None:
    """Record what a run is given.

    Raises:
        DataError: There are no such data files.
    """
    directory.folder.write(_NAME, _measure(config).model_dump_json(indent=2).encode())


def has_record(directory: RunDirectory) -> bool:
    """Return whether what a run was given is recorded; an older Sluice did not."""
    return directory.folder.size(_NAME) is not None


def check_files(directory: RunDirectory, config: RunConfig) -> None:
    """Check that data and tokenizer are those that the run was given; one without a record isn't checked.

    Raises:
        RunError: One of them has changed.
        DataError: A data file is gone.
    """
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
    """Check data and tokenizer, see `check_files`, and warn of modules that are not those that the run was given."""
    check_files(directory, config)
    before, now = _load(directory), _code_digests(config)
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


def data_digest(path: str) -> str:
    """Return a digest of the files that hold the rows at a path, in their order.

    Raises:
        DataError: See `data_files`.
    """
    from infra.datasets.files import data_files  # here: transformers is imported with it

    return _digest(data_files(path))


def _measure(config: RunConfig) -> RunInputs:
    return RunInputs(
        data={path: data_digest(path) for path in _data_paths(config)},
        tokenizer=_tokenizer_digest(Path(config.model.path)),
        code=_code_digests(config),
    )


def _load(directory: RunDirectory) -> RunInputs | None:
    return read_record(directory.folder, _NAME, RunInputs, "restore it")


def _data_paths(config: RunConfig) -> list[str]:
    held_out = [config.data.eval_path] if config.data.eval_path else []
    return [*(source.path for source in config.data.train_sources), *held_out]


def _tokenizer_digest(folder: Path) -> str:
    files = sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})
    names = " ".join(str(file.relative_to(folder)) for file in files)
    return _digest(files, names) if files else ""


def _code_digests(config: RunConfig) -> dict[str, str]:
    files = {module: _module_file(module) for path in _import_paths(config) for module in [path.partition(":")[0]]}
    return {module: _digest([file]) for module, file in sorted(files.items()) if file is not None}


def _import_paths(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    for each in [part.reward for part in reward.parts.values()] if isinstance(reward, WeightedReward) else [reward]:
        if isinstance(each, FunctionReward | GroupFunctionReward):
            yield each.path
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
