"""A run's assets in Prefect: data sets, checkpoints, evaluations and exported models, each named by where it is.

A key is the URL of a place, so what one run writes and another one reads is one asset. A run has one asset for all of
its checkpoints, and one for its evaluations: each new one is another materialization.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from prefect.assets import Asset, AssetProperties, add_asset_metadata
from prefect.context import AssetContext
from prefect.types.names import MAX_ASSET_KEY_LENGTH, RESTRICTED_ASSET_CHARACTERS

from infra.storage import places
from infra.storage.runs import RunDirectory
from infra.workers.inputs import given_folder, model_paths
from schemas.base import digest_of
from schemas.config.run import RunConfig
from schemas.config.store import CheckpointConfig
from schemas.step import EvalReport

MAX_UPSTREAM = 50  # of one asset; Prefect takes an event with 100 related resources at most
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HAS_CONTAINER = ("abfs", "wasb")  # whose URLs have a container before the @, and not a login


def asset_at(place: str | Path, name: str | None = None) -> Asset:
    """Return the asset at a local path or URL; its key has no login and no query.

    Args:
        place: The path or URL.
        name: The name that Prefect shows; None leaves it as it is.

    Example:
        >>> asset_at("s3://key:secret@bucket/a b.jsonl").key, asset_at("/data/train-[0-9].jsonl").key
        ('s3://bucket/a=20b.jsonl', 'file:///data/train-=5b0-9=5d.jsonl')
    """
    place = places.resolve(place)
    scheme, _, rest = (place if places.is_url(place) else f"file://{place}").rpartition("::")[2].partition("://")
    if scheme != "file":
        login, at, after = rest.partition("/")[0].rpartition("@")
        keeps = scheme.startswith(_HAS_CONTAINER) and ":" not in login
        rest = rest if keeps or not at else after + rest.removeprefix(f"{login}@{after}")
    if scheme.startswith("http"):
        rest = rest.partition("?")[0]
    escaped = "".join(f"={ord(each):02x}" if each in RESTRICTED_ASSET_CHARACTERS else each for each in rest)
    key = f"{re.sub('[^a-z0-9]', '', scheme.lower())}://{escaped}"
    if len(key) > MAX_ASSET_KEY_LENGTH:
        digest = digest_of(key)
        key = f"{key[: MAX_ASSET_KEY_LENGTH - len(digest) - 1]}-{digest}"
    return Asset(key=key, properties=AssetProperties(name=name) if name else None)


def model_at(path: str) -> Asset:
    """Return the asset of a model's folder, or of its name on the hub.

    Example:
        >>> model_at("Qwen/Qwen3-0.6B").key
        'huggingface://Qwen/Qwen3-0.6B'
    """
    is_on_hub = _HUB_NAME.fullmatch(path) is not None and not Path(path).exists()
    return asset_at(f"huggingface://{path}" if is_on_hub else path)


def trained_on(directory: RunDirectory, config: RunConfig) -> list[Asset]:
    """Return what checkpoints are made of: the models that the run was given, its teachers' included, and its prompts.

    The first is the model that it starts from. Where a link led when the run was given it is what counts.

    Raises:
        RunError: The record of what the run was given is damaged.
    """
    models = [model_at(given_folder(directory, path)) for path in model_paths(config)]
    return _each_once([*models, *(asset_at(source.path) for source in config.data.train_sources)])


def checkpoints_of(directory: RunDirectory, config: CheckpointConfig) -> Asset:
    """Return the asset of a run's checkpoints."""
    place = places.join(config.url, directory.run_id) if config.url else directory.checkpoints
    return asset_at(place, f"{directory.run_id}: checkpoints")


def evaluation_of(directory: RunDirectory) -> Asset:
    """Return the asset of a run's evaluations."""
    return asset_at(places.join(directory.url, "evaluation"), f"{directory.run_id}: evaluation")


def evaluated(directory: RunDirectory, config: RunConfig, version: int, data_path: str | None) -> list[Asset]:
    """Return what an evaluation is made of: held-out prompts, and the checkpoints or, of version 0, the model."""
    given = model_at(given_folder(directory, config.model.path))
    weights = checkpoints_of(directory, config.checkpoint) if version else given
    return [weights, *upstream([data_path] if data_path else [])]


def upstream(paths: Iterable[str]) -> list[Asset]:
    """Return the assets at some places, each once; of more than `MAX_UPSTREAM`, the first ones."""
    return _each_once(map(asset_at, paths))


def _each_once(assets: Iterable[Asset]) -> list[Asset]:
    return list({asset.key: asset for asset in assets}.values())[:MAX_UPSTREAM]


def describe(asset: Asset, metadata: Mapping[str, object]) -> None:
    """Add metadata to the asset that the current task run materializes; without Prefect, nothing is recorded."""
    if AssetContext.get() is not None:
        add_asset_metadata(asset, dict(metadata))


def describe_evaluation(directory: RunDirectory, report: EvalReport) -> None:
    """Add an evaluation's step and accuracy, and the loss of supervised fine-tuning, to its asset."""
    found = {"step": report.policy_version, "accuracy": report.accuracy, "num_prompts": report.num_prompts}
    loss = {} if report.loss is None else {"loss": report.loss}
    describe(evaluation_of(directory), {"run_id": directory.run_id, **found, **loss})
