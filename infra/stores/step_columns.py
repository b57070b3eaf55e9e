"""A step's columns over their lifetime: opened, extended by each stage, kept or cleared at the end."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Literal

from infra.storage.ledger import FORMAT, stage_key
from infra.storage.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.stores.open import close_store, open_store, start_store
from schemas.batch import BatchHandle, ChunkKey, ChunkRef, StoreTraffic
from schemas.config.run import RunConfig
from schemas.errors import ChunkCorruptedError, ChunkNotFoundError, StoreError
from schemas.step import PolicyHandle, RunHandle, StoredBatch

_CHUNKS = {  # by stage
    "rollout": "partial",
    "put": "rollout",
    "logprob": "behavior",
    "reference": "reference",
    "teacher": "teacher",
    "advantage": "advantage",
}

logger = logging.getLogger(__name__)


def open_step(run: RunHandle, policy: PolicyHandle) -> None:
    """Open the policy's step. If it was started before, keep what its committed stages have put.

    If a committed stage's columns are lost or damaged, the step's ledger entries are dropped with all of its columns;
    and so if the rollout's entry is lost and that of its rows isn't: others would be sampled for them.
    """
    store, ledger, step = open_store(run), RunDirectory.of(run).ledger, policy.step
    store.open(step)
    committed = {name for stage, name in _CHUNKS.items() if ledger.is_committed(stage_key(run, policy, stage))}
    if _CHUNKS["put"] not in committed:  # the stages after it extend its rows
        committed &= {_CHUNKS["rollout"]}
    try:
        if _CHUNKS["put"] in committed and _CHUNKS["rollout"] not in committed:
            raise StoreError("the ledger has lost the rollout that its rows are of")
        _keep_committed(store, step, committed)
    except StoreError as error:
        logger.warning("step %d is run again from its start: %s", step, error)
        ledger.drop_step(step)
        _restart_step(store, step)


def publish_handle(store: ColumnStore, batch: BatchHandle, traffic: Sequence[StoreTraffic]) -> StoredBatch:
    """Save a stage's batch as the step's newest handle; return it with the stage's total traffic."""
    store.save_batch(batch)
    return StoredBatch(batch=batch, traffic=StoreTraffic.total(traffic))


def clear_step(run: RunHandle, step: int) -> int:
    """Free the step's columns; return the bytes freed. Clearing twice is harmless.

    The ledger's entries go first, so that none outlives its columns. Its journals stay: whoever runs it again asks no
    environment twice.
    """
    _drop_records(RunDirectory.of(run), step)
    return open_store(run).clear(step)


def drop_journals(run: RunHandle, step: int) -> None:
    """Delete what rollout workers have recorded of a step, whose rows are stored now, or are to be played again."""
    if run.config.environments:
        RunDirectory.of(run).journals.drop(step)


def archive_step(run: RunHandle, step: int) -> None:
    """Close a finished step.

    A durable store keeps its columns, and the ledger its entries, until a checkpoint includes its update.
    """
    if not run.config.store.is_durable:
        _drop_records(RunDirectory.of(run), step)
    open_store(run).archive(step)


def close_other_steps(run: RunHandle, step: int) -> None:
    """Close the steps that a killed driver has left open, but for `step`, from which the run goes on.

    An open step takes capacity. One that is run again later, after a policy that was lost, is opened again then; if
    `step` had to wait for it, it would wait forever. What is begun of the responses of the next step stays.
    """
    store = open_store(run)
    for left in store.open_steps():
        if left != step and not (left == step + 1 and _is_only_begun(store, left)):
            archive_step(run, left)


def drop_outdated_steps(directory: RunDirectory, config: RunConfig, first: int) -> None:
    """Drop the steps from `first` on of a run whose ledger is of an older format, so that they are run again.

    Their columns, their plans and all of the ledger's entries are deleted; then the ledger has this version's format.
    The column store is started again, as an older version may have left its registry behind. For the same reason the
    run's workers must be killed before it is resumed; besides, they may be ahead of the checkpoint.

    Args:
        directory: The run, which no driver may be driving.
        config: Its config.
        first: The version of the newest complete checkpoint, which includes the steps before; 0 if there is none.
    """
    found = f"a ledger of format {directory.ledger.format()}, this Sluice writes format {FORMAT}"
    logger.warning(
        "run %s has %s: the steps after checkpoint %d are run again",
        directory.run_id,
        "lost its ledger" if directory.ledger.is_empty() else found,
        first,
    )
    close_store(directory, config)
    store, _ = start_store(directory, config)
    for step in {*directory.ledger.steps(), *store.steps()}:
        if step >= first:
            directory.drop_step_files(step)
            store.clear(step)
    directory.journals.drop_all()
    directory.ledger.renew()


def drop_steps(directory: RunDirectory, config: RunConfig) -> None:
    """Drop all columns, ledger entries and journals of the run: what is not in a checkpoint is run again."""
    directory.journals.drop_all()
    store, _ = start_store(directory, config)
    for step in {*directory.ledger.steps(), *store.steps()}:
        _drop_records(directory, step)
        store.clear(step)


def sweep_steps(run: RunHandle, first: int) -> None:
    """Clear the steps before `first`, the first one that may still be run.

    Those that `store.keep_steps` and `store.keep_bytes` name stay readable; what killed writers have left in them is
    removed. One without entries in the ledger was swept before, so that the sweep of a run that keeps all steps touches
    the new ones only.
    """
    directory, store, config = RunDirectory.of(run), open_store(run), run.config.store
    if run.config.environments:
        directory.journals.drop_before(first)  # such as what a lost worker has written too late
    entered = set(directory.ledger.steps())
    finished = [step for step in {*entered, *store.steps()} if step < first]
    sizes = store.bytes_by_step() if config.keep_bytes is not None else {}
    kept = steps_to_keep({step: sizes.get(step, 0) for step in finished}, first, config.keep_steps, config.keep_bytes)
    for step in sorted(finished):
        if step not in kept:
            _drop_records(directory, step)
            store.clear(step)
        elif step in entered:
            store.archive(step)  # first: a kill in between must not leave it open
            with suppress(ChunkCorruptedError):  # it stays readable as far as it is
                store.drop_leftovers(step)
            if step + 1 < first or run.config.runtime.max_staleness < 2:  # else step `first` may continue its rollout
                directory.ledger.drop_step(step)


def steps_to_keep(
    sizes: Mapping[int, int], first: int, keep_steps: int | Literal["all"], keep_bytes: int | None
) -> set[int]:
    """Return the finished steps that stay readable.

    Args:
        sizes: The bytes of each finished step's columns.
        first: The step after the last finished one.
        keep_steps: See `store.keep_steps`.
        keep_bytes: See `store.keep_bytes`.

    Example:
        >>> sizes = {3: 10, 4: 10, 5: 10}
        >>> steps_to_keep(sizes, 6, 2, None), steps_to_keep(sizes, 6, "all", 25), steps_to_keep(sizes, 6, "all", 5)
        ({4, 5}, {4, 5}, {5})
    """
    oldest = 0 if keep_steps == "all" else first - keep_steps
    newest = sorted((step for step in sizes if step >= oldest), reverse=True)
    totals = accumulate(sizes[step] for step in newest)
    return {
        step
        for at, (step, total) in enumerate(zip(newest, totals, strict=True))
        if at == 0 or keep_bytes is None or total <= keep_bytes
    }


def _drop_records(directory: RunDirectory, step: int) -> None:
    """Delete a step's ledger entries, its plan and its failures."""
    directory.ledger.drop_step(step)
    directory.drop_step_files(step)


def _keep_committed(store: ColumnStore, step: int, committed: set[str]) -> None:
    """Delete the chunks of a step that are not of these stages, and check the others.

    A stage that is not committed runs again, perhaps with other ranks or on another machine, and could put other
    chunks under the same keys.
    """
    chunks = store.chunks(step)
    stale = [ref for ref in chunks if _stage_of(ref) not in committed]
    if _CHUNKS["put"] not in committed and len(stale) == len(chunks):
        if chunks:
            _restart_step(store, step)
        return
    store.delete(stale)
    if _CHUNKS["put"] not in committed:
        return
    if (batch := store.load_batch(step)) is None:
        raise ChunkNotFoundError("its columns are no longer in the store")
    kept = batch.replace(groups=[group for group in batch.groups if {*map(_stage_of, group.chunks)} <= committed])
    store.verify(kept)
    if kept != batch:
        store.save_batch(kept)


def _is_only_begun(store: ColumnStore, step: int) -> bool:
    """Return whether a step has no chunks but those of responses that are to be continued."""
    try:
        return {_stage_of(ref) for ref in store.chunks(step)} <= {_CHUNKS["rollout"]}
    except ChunkCorruptedError:
        return False


def _restart_step(store: ColumnStore, step: int) -> None:
    store.clear(step)
    store.open(step)


def _stage_of(ref: ChunkRef) -> str:
    return ChunkKey.parse(ref.key).stage
