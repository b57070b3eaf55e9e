"""The columns that a run no longer has to keep."""

from typing import Literal

from infra.checkpoints import open_checkpoints
from infra.storage.driver_lock import driver_lock
from infra.storage.identity import owns_place
from infra.storage.runs import RunDirectory
from infra.stores.open import open_files
from infra.stores.step_columns import steps_to_keep
from schemas.base import Frozen
from schemas.config.store import SharedStore
from schemas.errors import RunError


class Garbage(Frozen):
    """What a collection removes, or would remove."""

    run_id: str
    steps: tuple[int, ...]  # whose columns and plans go
    num_bytes: int  # of these steps' columns
    shared_bytes: int  # of these, those that a fork, or the run that it was forked from, has, too: they aren't freed
    kept_steps: int
    kept_bytes: int


def collect_garbage(
    directory: RunDirectory, keep_steps: int | Literal["all"] | None, keep_bytes: int | None, *, dry_run: bool
) -> Garbage:
    """Remove the columns and plans of finished steps that need not be kept, and what is left of their journals.

    What a resume may need stays: the steps after the newest complete checkpoint, and those before it whose groups may
    be trained on again (`data.reuse`). So does what the run has of a run that it was forked from.

    Args:
        directory: The run, which no driver may be driving.
        keep_steps: As `store.keep_steps`; None: the run's own.
        keep_bytes: As `store.keep_bytes`; None: the run's own.
        dry_run: Whether to remove nothing.

    Raises:
        RunError: The run is being driven, or keeps no columns on disk, or those at `store.url` are another run's.
    """
    config = directory.config()
    if isinstance(config.store, SharedStore):
        raise RunError(f'run {directory.run_id} keeps no columns on disk: its store.kind is "shared"')
    with driver_lock(directory):
        if config.store.url and not owns_place(directory, config.store.url):
            raise RunError(
                f"the columns of {directory.url} in {config.store.url} are those of another run of this id, of which "
                "it may be a copy; give that one to gc"
            )
        store = open_files(directory, config.store, read_only=dry_run)
        first = max(open_checkpoints(directory, config.checkpoint).complete_versions(), default=0)
        sizes = {step: size for step, size in store.bytes_by_step().items() if step < first}
        steps = config.store.keep_steps if keep_steps is None else keep_steps
        kept = steps_to_keep(sizes, first, steps, config.store.keep_bytes if keep_bytes is None else keep_bytes)
        kept |= {step for step in sizes if step >= first - config.steps_kept_for_reuse}
        removed = sorted(sizes.keys() - kept)
        shared = store.shared_bytes_by_step()
        if not dry_run:
            directory.journals.drop_before(first)
        for step in removed if not dry_run else ():
            directory.drop_step_files(step)
            store.clear(step)
    return Garbage(
        run_id=directory.run_id,
        steps=tuple(removed),
        num_bytes=sum(sizes[step] for step in removed),
        shared_bytes=sum(shared.get(step, 0) for step in removed),
        kept_steps=len(kept),
        kept_bytes=sum(sizes[step] for step in kept),
    )
