"""What a fork has of the steps before it: its parent's files, as hard links, so that forks store no byte twice.

The steps stay readable when the parent is removed, or collects its garbage. They are a run directory of their own, in
which nothing is rewritten: the parent's config, reports and decisions of the time, the columns and plans of its steps,
and its checkpoints up to the fork.
"""

from contextlib import suppress
from pathlib import PurePosixPath

from infra.checkpoints.files import MANIFEST
from infra.storage import places
from infra.storage.folder import Folder
from infra.storage.ledger import step_number
from infra.storage.lineage import PAST, Fork, load_fork, parent_of, past_of, save_fork
from infra.storage.runs import RunDirectory, open_folder
from infra.stores.chunk_files import BATCH_NAME, STORE_PATH
from schemas.errors import RunError


def link_past(parent: RunDirectory, directory: RunDirectory, fork: Fork) -> None:
    """Link what a run was after `fork.step` steps into the directory of a new fork, what it has of its own past too.

    Where hard links don't work, nothing is there, and the parent is read in place. So are, in any case, columns and
    checkpoints that are not in its directory, but under `store.url` or `checkpoint.url`.
    """
    directory.folder.remove_folder(PAST)  # of a fork that was interrupted
    if not (fork.step and parent.is_local and directory.is_local):
        return
    past = past_of(directory, fork)
    if not _link_files(parent, past, fork.step):
        directory.folder.remove_folder(PAST)
        return
    if (origin := load_fork(parent)) is not None:
        save_fork(past, origin)
        with suppress(RunError):  # the parent's own parent is gone, with its steps
            link_past(parent_of(parent, origin), past, origin.replace(step=min(origin.step, fork.step)))
    past.metrics.copy_from(parent.metrics, fork.step)
    for event in parent.metrics.events():
        if event.step < fork.step:
            past.metrics.append_event(event)
    past.decisions.copy_from(parent.decisions, fork.step)
    past.write_config(parent.config())  # last: it makes it a run


def _link_files(parent: RunDirectory, past: RunDirectory, step: int) -> bool:
    """Link the files of the steps before `step`, and of the versions up to it; return whether hard links work."""
    columns, plans, checkpoints = (open_folder(place) for place in _places(parent))
    steps = _complete(columns, BATCH_NAME, step)
    named = {
        columns: [*([STORE_PATH] if columns.size(STORE_PATH) else []), *_files(columns, steps, BATCH_NAME)],
        plans: [name for name in plans.sizes() if PurePosixPath(name).stem in steps],
        checkpoints: _files(checkpoints, _complete(checkpoints, MANIFEST, step + 1), MANIFEST),
    }
    return all(
        target.link(source, name) or source.size(name) is None  # that is: the run, which may go on, has removed it
        for (source, names), target in zip(named.items(), map(open_folder, _places(past)), strict=True)
        for name in names
    )


def _places(run: RunDirectory) -> tuple[str, str, str]:
    return run.columns, places.join(run.url, "plans"), run.checkpoints


def _complete(folder: Folder, mark: str, stop: int) -> set[str]:
    """Return the subfolders of steps before `stop` that have the file which is written last, the mark."""
    marked = {str(PurePosixPath(name).parent) for name in folder.sizes() if PurePosixPath(name).name == mark}
    return {name for name in marked if (step := step_number(name)) is not None and step < stop}


def _files(folder: Folder, steps: set[str], mark: str) -> list[str]:
    """Return the files of subfolders, the marks last."""
    found = [name for name in folder.sizes() if PurePosixPath(name).parts[0] in steps]
    return sorted(found, key=lambda name: PurePosixPath(name).name == mark)
