"""Stored groups that a run trains on again: which ones a step takes, and their rows.

A step reads them once, and stores them as rows of its own: whatever is done with the step later, such as a resume, a
replay or a bundle, doesn't depend on the steps that they come from.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np
import pyarrow as pa

from infra.history.kept_run import ranges
from infra.history.stored_step import rollout_columns
from infra.storage.lineage import owner_of
from infra.storage.runs import RunDirectory
from infra.stores.files import FsspecColumnStore
from infra.stores.offline import open_own_columns
from rl_core.advantages.base import find_equal
from rl_core.columns.jagged import BRANCH_COLUMNS, unbranched
from rl_core.rollout.reuse import draw_groups, reusable_steps
from rl_core.views import decode_ints, select
from schemas.batch import BatchHandle
from schemas.config.changes import rejected_changes
from schemas.config.run import RunConfig
from schemas.errors import RunError
from schemas.rollout import ReusedGroup
from schemas.step import RunHandle

# What stored rows have of a run's settings, and a later step of a fork with other ones would not.
_OF_ROWS = re.compile(r"reward\b.*|distillation\.teachers\.\w+(\.(prompt|data_sources))?")
_ADVICE = "leave that as it was, or give the fork data.reuse=null"


def choose_groups(run: RunHandle, step: int) -> tuple[ReusedGroup, ...]:
    """Return the groups that `step` takes from stored steps, a function of (seed, step) and what these have sampled.

    They are drawn among all groups with variance, as the others have advantages of 0; with teachers, among all.

    Raises:
        RunError: A step whose groups it may take is not kept.
        StoreError: Columns are damaged.
    """
    reuse = run.config.data.reuse
    if reuse is None:
        return ()
    # A finished step of another run stays as it is; one of its own may be run again.
    find = _find_groups if reuse.run is None else _find_groups_once
    has_teachers = run.config.distillation is not None
    steps = reusable_steps(run.config, step)
    found = [group for each in steps for group in find(_source(run, each).url, each, equal_too=has_teachers)]
    return draw_groups(found, reuse.num_groups, run.config.seed, step)


def read_groups(
    run: RunHandle,
    reused: Sequence[ReusedGroup],
    numbers: Sequence[int],
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> pa.RecordBatch:
    """Read the rows of stored groups, group by group, in their stored order and without those whose reward failed.

    Args:
        run: The run that takes them.
        reused: The groups, by step.
        numbers: Their numbers within the step that takes them, which are in `group_id`.
        is_wanted: Tells whether a column of the rollout is read; `group_id` is. Reward parts that only some of the
            steps have are null in the others.

    Raises:
        RunError: A step is not kept.
        StoreError: Columns are lost or damaged.
    """
    tables, number = [], dict(zip(reused, numbers, strict=True))
    for step, groups in groupby(reused, key=lambda group: group.step):
        store, batch = _open(_source(run, step), step)
        stored = rollout_columns(batch)
        ids = store.read(batch, ["group_id"])["group_id"].to_numpy()
        of_groups = {number[group]: np.flatnonzero(ids == group.group) for group in groups}
        view = select(batch, np.concatenate(list(of_groups.values())))
        rows = store.read(view, list(filter(is_wanted, stored)))
        own = np.repeat(list(of_groups), [len(each) for each in of_groups.values()])
        at = rows.schema.get_field_index("group_id")
        tables.append(pa.table(_with_parents(rows.set_column(at, "group_id", pa.array(own, pa.int32())))))
    (rows,) = pa.concat_tables(tables, promote_options="default").combine_chunks().to_batches()
    return rows


def _with_parents(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Add the parents of turns, which steps of earlier versions lack: their rows don't branch."""
    sampled, between, parents = BRANCH_COLUMNS
    if not {sampled, between} <= set(rows.schema.names) or parents in rows.schema.names:
        return rows
    return rows.append_column(parents, unbranched(rows[sampled], rows[between]))


def check_source(config: RunConfig, num_positions: int) -> RunDirectory | None:
    """Check that the steps of another run can be trained on; return that run, None if groups are the run's own.

    Args:
        config: The run that takes its groups.
        num_positions: The most tokens of a sequence that the model accepts.

    Raises:
        RunError: There is no such run, a step is not finished or not kept, or its rows have other columns, are too
            long, or have no teacher.
    """
    reuse = config.data.reuse
    if reuse is None or reuse.run is None or reuse.steps is None:
        return None
    source = RunDirectory.open(reuse.run, config.runtime.runs_dir)
    _check_kinds(config, source, "choose a data.reuse.run that agrees with it")
    finished = {report.step for report in source.metrics.steps()}
    if missing := [step for step in range(*reuse.steps) if step not in finished]:
        raise RunError(
            f"data.reuse.steps = {list(reuse.steps)} has steps {', '.join(ranges(missing))}, which run {source.run_id} "
            f"has not finished; finished: {', '.join(ranges(sorted(finished))) or 'none'}"
        )
    for step in range(*reuse.steps):
        store, batch = _open(owner_of(source, step), step)
        longest = int((decode_ints(batch.prompt_lengths) + decode_ints(batch.response_lengths)).max())
        _check_length(config, source.run_id, step, longest, num_positions)
        _check_sources(config, source.run_id, store, batch)
    return source


def check_parent(config: RunConfig, parent: RunDirectory, step: int) -> None:
    """Check that the steps whose groups a fork after `step` takes at its start are kept, and are what it trains on.

    Raises:
        RunError: One isn't; or its rows have other columns, rewards, or prompts of teachers than the fork's own.
    """
    if config.data.reuse is None or config.data.reuse.max_age is None:
        return
    for each in reusable_steps(config, step):
        owner = owner_of(parent, each)
        _check_kinds(config, owner, _ADVICE)
        if changed := list(filter(_OF_ROWS.fullmatch, rejected_changes(owner.config(), config))):
            raise RunError(
                f"data.reuse: the groups of run {owner.run_id} have another {', '.join(changed)} than this one, which "
                f"would train on them for up to max_age = {config.data.reuse.max_age} steps; {_ADVICE}"
            )
        _open(owner, each)


def _check_kinds(config: RunConfig, source: RunDirectory, advice: str) -> None:
    both = config, source.config()
    for key, (own, other) in {
        "environment": [bool(each.environments) for each in both],
        "rollout.router_replay": [each.rollout.router_replay for each in both],
        "rollout.sampling_mask": [each.rollout.sampling_mask for each in both],
        "prompts of teachers": [each.distillation is not None and each.distillation.has_prompts for each in both],
        "runtime.max_staleness above 1": [each.runtime.max_staleness > 1 for each in both],
    }.items():
        if own != other:
            has = ["has", "has no"]
            raise RunError(
                f"data.reuse: run {source.run_id} {has[not other]} {key}, but this one {has[not own]}, so that "
                f"their rows have different columns; {advice}"
            )


def _check_sources(config: RunConfig, run_id: str, store: FsspecColumnStore, batch: BatchHandle) -> None:
    distillation = config.distillation
    if distillation is None or all(not teacher.data_sources for teacher in distillation.teachers.values()):
        return
    infos = filter(None, store.read(batch, ["info"])["info"].to_pylist())
    found = {json.loads(info)["data_source"] for info in infos}
    if lacking := sorted(each for each in found if distillation.teacher_of(each) is None):
        raise RunError(
            f"data.reuse.run: step {batch.step} of run {run_id} has rows of the data source {lacking[0]!r}, which has "
            "no teacher; name it in data_sources of one of distillation.teachers, or choose other data.reuse.steps"
        )


def _check_length(config: RunConfig, run_id: str, step: int, longest: int, num_positions: int) -> None:
    limits = {"packing.token_budget": config.packing.token_budget, "the model's positions": num_positions}
    name, limit = min(limits.items(), key=lambda each: each[1])
    if longest > limit:
        raise RunError(
            f"data.reuse.run: step {step} of run {run_id} has a row of {longest} tokens, more than {name}, {limit}; "
            "raise it, or choose other data.reuse.steps"
        )


def _source(run: RunHandle, step: int) -> RunDirectory:
    """Return the run that has the columns of a step from which groups are taken."""
    directory, reuse = RunDirectory.of(run), run.config.data.reuse
    other = reuse.run if reuse is not None else None
    return owner_of(directory if other is None else RunDirectory.open(other, directory.runs_dir), step)


def _open(directory: RunDirectory, step: int) -> tuple[FsspecColumnStore, BatchHandle]:
    store = open_own_columns(directory)
    batch = store.load_batch(step)
    if batch is None:
        raise RunError(
            f"data.reuse takes groups of step {step} of run {directory.run_id}, whose columns are not kept any more; "
            "steps whose columns it keeps: "
            f"{', '.join(ranges([each for each in store.steps() if store.load_batch(each) is not None])) or 'none'}"
        )
    return store, batch


def _find_groups(place: str, step: int, *, equal_too: bool) -> tuple[ReusedGroup, ...]:
    """Return the groups with different rewards, or all, that a run sampled in a step, not those that it reused."""
    directory = RunDirectory(place)
    store, batch = _open(directory, step)
    columns = store.read(batch, ["group_id", "reward"])
    ids, rewards = (columns[name].to_numpy() for name in columns.schema.names)
    own = ids < directory.config().first_reused_group
    if equal_too:
        groups = np.unique(ids[own])
    else:
        is_equal = find_equal(rewards[own].astype(np.float64), ids[own], int(ids[own].max(initial=-1)) + 1)
        groups = np.flatnonzero(~is_equal)
    return tuple(ReusedGroup(step=step, group=group) for group in groups.tolist())


_find_groups_once = lru_cache(maxsize=None)(_find_groups)
