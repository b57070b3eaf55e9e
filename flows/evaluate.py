"""`sluice eval`: held-out accuracy of a checkpoint or of a model, in this process, without Ray and Prefect."""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from flows.lifecycle.secrets import take_secrets
from flows.preflight import check
from infra.checkpoints.model import write_model_folder
from infra.checkpoints.store import open_checkpoints
from infra.datasets.files import data_files
from infra.storage.identity import new_identity
from infra.storage.runs import RunDirectory
from infra.stores.chunk_index import MemoryStore
from infra.workers.rollout import RolloutWorker
from infra.workers.sft import SftWorker
from rl_core.rollout.evaluation import split_prompts, summarize, summarize_held_out
from schemas.config.load import override_config
from schemas.config.run import RunConfig
from schemas.config.runtime import ApprovalConfig
from schemas.errors import ConfigError, DataError, RunError
from schemas.step import EvalReport, RunHandle


def evaluate_run(
    directory: RunDirectory, data_path: str | None, num_prompts: int | None, overrides: Sequence[str] = ()
) -> EvalReport:
    """Evaluate the run's newest checkpoint on held-out prompts, batch by batch as the run's own evaluations do.

    Args:
        directory: The run.
        data_path: A prompt file; None for the config's `data.eval_path`.
        num_prompts: The maximum number of prompts; None for the config's `eval.num_prompts`.
        overrides: `section.key=value` changes to the run's config, e.g. `eval.samples_per_prompt=8`.

    Raises:
        RunError: The run has no checkpoint.
        ConfigError: An override is not allowed, or neither `data_path` nor the config names a prompt file.
    """
    config = override_config(directory.config(), overrides, directory.run_id)
    take_secrets(config.services)
    store = open_checkpoints(directory, config.checkpoint)
    found = store.newest()
    if found is None:
        raise RunError(f"run {directory.run_id} has no complete checkpoint in {store}")
    if data_path is None and config.data.eval_path is None:
        raise ConfigError(f"run {directory.run_id} has no data.eval_path; pass a prompt file with --data FILE")
    version = found[0]
    if config.sft is not None:
        return _score_held_out(directory, _of_held_out(config, data_path, num_prompts))
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        model = Path(folder, "model")
        dtype = torch.float32  # that every engine can load
        write_model_folder(store, version, model, dtype, is_durable=False)
        return _sample_held_out(directory, _of_model(_of_held_out(config, data_path, num_prompts), model), version)


def evaluate_model(config: RunConfig, model: str, data_path: str) -> EvalReport:
    """Evaluate a model on all held-out prompts or rows of a file, otherwise as a run of this config would.

    Raises:
        UserError: The model, or a prompt, is not usable.
    """
    config = _of_model(_of_held_out(config, data_path, sys.maxsize), Path(model))
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        directory = RunDirectory(Path(folder, "evaluation"))  # without a checkpoint
        if config.sft is not None:
            return _score_held_out(directory, config)
        return _sample_held_out(directory, config, 0)


def _sample_held_out(directory: RunDirectory, config: RunConfig, version: int) -> EvalReport:
    """Sample and score responses to the held-out prompts by the config's model."""
    check(config, trains=False)
    run, columns = _here(directory, config)
    worker = RolloutWorker(run, store=columns)
    worker.start()
    try:
        started = time.perf_counter()
        batches = split_prompts(config.eval, worker.num_held_out())
        shards = [worker.evaluate(0, rows) for rows in batches.values()]
        return summarize(config, version, shards, time.perf_counter() - started)
    finally:
        worker.close()


def _score_held_out(directory: RunDirectory, config: RunConfig) -> EvalReport:
    """Score the held-out rows of supervised fine-tuning by the run's policy, as one rank."""
    check(config, directory)
    run, store = _here(directory, config)
    worker = SftWorker(run, store=store)
    version = worker.start().version
    started, plan = time.perf_counter(), worker.plan_held_out(1)
    parts = [worker.score_held_out(plan, version)]
    return summarize_held_out(version, len(plan.rows), parts, time.perf_counter() - started)


def _of_held_out(config: RunConfig, data_path: str | None, num_prompts: int | None) -> RunConfig:
    """Return the config with these prompts, and without what takes no part: it may be gone, or not to be written to.

    Training prompts stay only if they decide which environment a held-out row has.
    """
    data = config.data.replace(eval_path=data_path or config.data.eval_path, reuse=None)
    first, *others = config.environment_by_source
    if all(other == first for other in others):
        data = data.replace(train_path=data.eval_path, sources=(), curriculum=None)
        config = config.replace(data=data, environment=first)
    else:
        _require_files([source.path for source in data.sources])
    return config.replace(
        data=data,
        eval=config.eval.replace(num_prompts=num_prompts or config.eval.num_prompts),
        distillation=None,
        monitors=(),
        approval=ApprovalConfig(),
        runtime=config.runtime.replace(runs_dir=tempfile.gettempdir()),
    )


def _require_files(paths: Sequence[str]) -> None:
    for path in paths:
        try:
            data_files(path)
        except DataError as error:
            why = "an evaluation reads it, as data.sources have several environments: it tells which one a row has"
            raise DataError(f"{error}; {why}") from None


def _of_model(config: RunConfig, model: Path) -> RunConfig:
    return config.replace(model=config.model.replace(path=str(model), lora=None))


def _here(directory: RunDirectory, config: RunConfig) -> tuple[RunHandle, MemoryStore]:
    """Return a run's handle in this process alone, and a store for its workers: an evaluation stores nothing."""
    run = RunHandle(
        run_id=directory.run_id,
        identity=new_identity(directory.run_id),
        directory=directory.url,
        config=config,
        store_incarnation="",
    )
    return run, MemoryStore(run.run_id, capacity_bytes=1)
