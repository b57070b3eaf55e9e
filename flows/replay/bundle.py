"""`sluice bundle` and `sluice reproduce`: one file with all that a step can be computed again from, on any machine."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from flows.replay.session import new_scratch_id, write_version
from infra.checkpoints import open_checkpoints
from infra.history.bundle_files import FORMAT, BundleManifest, pack, unpack
from infra.history.past_weights import History
from infra.history.stored_step import StoredStep
from infra.storage.lineage import owner_of
from infra.storage.runs import RunDirectory, installed_versions
from infra.stores.files import FsspecColumnStore
from infra.workers.inputs import check_models
from schemas.batch import ChunkKey, ChunkRef
from schemas.config.rollout import EngineRollout, RolloutConfig, TransformersRollout
from schemas.config.run import RunConfig
from schemas.config.runtime import ApprovalConfig, RuntimeConfig, ServicesConfig, TimeoutsConfig, WeightsConfig
from schemas.config.store import FsspecStore
from schemas.errors import BundleError, RunError

MODEL = "model"
TEXTS = ("prompt_text", "response_text", "answer", "info")  # what a redacted bundle leaves out
_MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")  # no pickle
_PLACES = (  # the settings of `runtime` by which a step is computed
    *("num_policy_ranks", "num_policy_replicas", "num_reference_ranks", "num_threads"),
    *("device", "placement", "gradient_sync", "max_staleness"),
)


def write_bundle(directory: RunDirectory, step: int, out: Path, *, is_redacted: bool) -> BundleManifest:
    """Write a step as a bundle: its rows, plan, report and config, the weights before it, and the model's folder.

    Args:
        directory: The run.
        step: The step.
        out: The file to write.
        is_redacted: Whether to leave texts out. Tokens stay, as all else is computed from them.

    Raises:
        BundleError: The file exists.
        RunError: The step, or the weights before it, can't be had again; or the model is in no local folder.
        StoreError: Columns are lost or damaged.
    """
    if out.exists():
        raise BundleError(f"{out} exists; choose another name, or remove it")
    directory = owner_of(directory, step)
    history = History(directory)
    (stored,), start, config = history.steps(step, step + 1), history.start(step), directory.config()
    if not Path(config.model.path).is_dir():
        raise RunError(f"model.path {config.model.path} is not a local folder, so that it can't be put into a bundle")
    if any(teacher.path for teacher in (config.distillation.teachers.values() if config.distillation else ())):
        raise RunError(
            f"run {directory.run_id} has teachers with weights of their own, which a bundle doesn't hold, so that its "
            "step could not be run again; sluice replay runs it where the teachers are"
        )
    check_models(directory, [config.model.path])
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.resolve().parent) as folder:
        copy = RunDirectory(Path(folder, directory.run_id))
        own = _portable(config, MODEL)
        write_version(history, start, open_checkpoints(copy, own.checkpoint), new_scratch_id(directory.run_id))
        _copy_columns(copy, stored, is_redacted=is_redacted)
        if stored.plan is not None:
            copy.plans.save(step, stored.plan)
        copy.metrics.append_step(stored.report)
        copy.decisions.copy_from(directory.decisions, step)
        _copy_model(Path(config.model.path), copy.path / MODEL)
        copy.write_config(own)
        events = directory.metrics.events()
        manifest = BundleManifest(
            format=FORMAT,
            run_id=directory.run_id,
            step=step,
            is_redacted=is_redacted,
            versions=next((event.versions for event in reversed(events) if event.step <= step), {}),
            files={},
        )
        return pack(copy.path, out, manifest)


@contextmanager
def opened_bundle(bundle: Path) -> Iterator[tuple[RunDirectory, BundleManifest]]:
    """Hold a temporary run directory with a bundle's content, checked.

    Raises:
        BundleError: It is no bundle, one of a newer format, damaged or unsafe.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        place = Path(folder, "run")
        manifest = unpack(bundle, place)
        directory = RunDirectory(place.rename(Path(folder, manifest.run_id)))
        if not directory.exists:
            raise BundleError(f"{bundle} is damaged: it has no config.json")
        directory.write_config(_portable(directory.config(), str(directory.path / MODEL)))
        yield directory, manifest


def different_versions(manifest: BundleManifest) -> dict[str, tuple[str, str]]:
    """Return the packages of which other versions are installed than the step was run with: those and these."""
    installed = installed_versions()
    names = sorted(manifest.versions.keys() | installed.keys()) if manifest.versions else []
    pairs = {name: (manifest.versions.get(name, "none"), installed.get(name, "none")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def without_programs(rollout: RolloutConfig) -> RolloutConfig:
    """Return the same sampling by an engine that names no file to run: a replay samples nothing."""
    if rollout.kind == "program":
        return TransformersRollout(**{name: getattr(rollout, name) for name in EngineRollout.model_fields})
    return rollout.replace(python=None) if rollout.kind == "vllm" else rollout


def _portable(config: RunConfig, model: str) -> RunConfig:
    """Return a config that names no place but the bundle's own; so does one that comes from elsewhere."""
    return config.replace(
        model=config.model.replace(path=model),
        rollout=without_programs(config.rollout),
        store=FsspecStore(keep_steps="all"),
        checkpoint=config.checkpoint.replace(url=None),
        monitors=(),
        runtime=RuntimeConfig(**{name: getattr(config.runtime, name) for name in _PLACES}),
        services=ServicesConfig(),
        timeouts=TimeoutsConfig(),
        weights=WeightsConfig(),
        approval=ApprovalConfig(),
    )


def _copy_columns(copy: RunDirectory, stored: StoredStep, *, is_redacted: bool) -> None:
    """Put a step's chunks into a store of the bundle's own, and save its batch."""
    store = FsspecColumnStore(copy.run_id, copy.columns)
    store.open(stored.step)
    moved: dict[ChunkRef, ChunkRef] = {}
    for ref in stored.batch.chunks:
        columns = stored.read_chunk(ref)
        moved[ref] = store.put(ChunkKey.parse(ref.key), _redacted(columns) if is_redacted else columns)
    groups = [group.replace(chunks=tuple(moved[ref] for ref in group.chunks)) for group in stored.batch.groups]
    store.save_batch(stored.batch.replace(groups=tuple(groups)))
    store.archive(stored.step)


def _redacted(columns: pa.RecordBatch) -> pa.RecordBatch:
    empty = pa.array([""] * columns.num_rows, pa.string())
    names = columns.schema.names
    return pa.RecordBatch.from_arrays(
        [empty if name in TEXTS else columns[name] for name in names], schema=columns.schema
    )


def _copy_model(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted({path for pattern in _MODEL_FILES for path in source.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, target / path.name)
