"""`sluice fork`: a run that has the weights, optimizer and metrics of another one at an earlier step, and goes on."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from flows.replay.session import write_version
from infra.checkpoints import open_checkpoints
from infra.history.past import link_past
from infra.history.past_weights import History, Start
from infra.history.reuse import check_parent
from infra.storage.driver_lock import driver_lock
from infra.storage.identity import claim_identity
from infra.storage.lineage import Fork, owner_of, save_fork
from infra.storage.runs import RunDirectory, installed_versions
from infra.workers.inputs import check_models, has_record, model_paths, record_inputs
from schemas.config.changes import is_changeable, measuring_changes
from schemas.config.load import changed_keys, differences, override_config
from schemas.config.run import RunConfig
from schemas.errors import RunError
from schemas.step import RunEvent

PARENT, OWN = "parent", "own"


@dataclass(frozen=True)
class PlannedFork:
    """A fork that can be made."""

    parent: RunDirectory  # the run that is forked
    # That of the run that made the first version: the parent or, before it was forked itself, an ancestor.
    history: History
    step: int  # the steps of the parent that it has
    start: Start  # what its first version is made of
    config: RunConfig  # its config
    directory: RunDirectory  # where it will be

    @property
    def num_replayed(self) -> int:
        """How many updates have to be repeated."""
        return len(self.start.steps)

    @property
    def order_note(self) -> str | None:
        """What becomes of the order of rows if a step takes another number of them; None: it goes on."""
        if self.config.data.curriculum is not None:
            return None
        before, own = (self.step * _rows_per_step(config) for config in (self.parent.config(), self.config))
        if before == own:
            return None
        what = f"skips {own - before:,} rows" if own > before else f"takes {before - own:,} rows once more"
        return f"with its own number of rows a step, the fork {what} of the order that run {self.parent.run_id} took"

    @property
    def lineage(self) -> Fork:
        """Its content of `fork.json`."""
        changed = differences({PARENT: self.parent.config(), OWN: self.config})
        changes = {key: (each.get(PARENT), each.get(OWN)) for key, each in changed.items()}
        return Fork(parent=self.parent.url, run_id=self.parent.run_id, step=self.step, changes=changes)


def plan_fork(
    parent: RunDirectory, step: int, run_id: str | None = None, note: str | None = None, overrides: Sequence[str] = ()
) -> PlannedFork:
    """Check that a run can be forked; nothing is made.

    Args:
        parent: The run.
        step: How many of its steps the fork has.
        run_id: The fork's id; None: from the parent's and the step.
        note: The fork's `note`; None: the parent's.
        overrides: `section.key=value` changes to the parent's config.

    Raises:
        RunError: There is no such step, or its weights can't be had again; the fork exists; or it would have another
            model (its path may lead to one by now), a state that the parent's doesn't have, such as another
            curriculum's, or reuse groups of steps that aren't kept.
        ConfigError: An override is invalid.
        StoreError: A column that is needed is lost or damaged.
    """
    before = parent.config()
    if RunDirectory.at(before, parent.run_id).url != parent.url:  # it was moved
        before = before.replace(runtime=before.runtime.replace(runs_dir=parent.runs_dir))
    config = override_config(before, overrides, parent.run_id)
    config = config if note is None else config.replace(note=note)
    directory = RunDirectory.require_absent(config, run_id or f"{parent.run_id}-at-{step}")
    _check_changes(parent, before, config, step)
    check_models(parent, model_paths(config))
    history = History(owner_of(parent, step))
    start = history.start(step)
    check_parent(config, parent, step)
    return PlannedFork(parent, history, step, start, config, directory)


def make_fork(fork: PlannedFork) -> None:
    """Make a fork. One that is interrupted leaves no run, as `config.json` is written last.

    Raises:
        RunError: Another process makes it, or has made it meanwhile, or `checkpoint.url` or `store.url` holds what
            another run of its id has written.
        PipelineError: What the workers raise, if updates have to be repeated.
    """
    parent, directory = fork.parent, fork.directory
    if directory.is_local:
        directory.path.mkdir(parents=True, exist_ok=True)
    with driver_lock(directory):
        if directory.exists:
            raise RunError(
                f"run {directory.run_id} was made by another process meanwhile, and is left as it is; start the same "
                "command again, which goes on with it, or says how"
            )
        claim_identity(directory, fork.config)  # first: what is removed must be its own
        checkpoints = open_checkpoints(directory, fork.config.checkpoint)
        checkpoints.remove_all()  # of a fork that was interrupted
        save_fork(directory, fork.lineage)
        link_past(parent, directory, fork.lineage)
        write_version(fork.history, fork.start, checkpoints, directory.run_id)
        has_evals = not measuring_changes(parent.config(), fork.config)  # else it evaluates the same weights otherwise
        directory.metrics.copy_from(parent.metrics, fork.step, with_evals=has_evals)
        directory.decisions.copy_from(parent.decisions, fork.step)
        directory.metrics.append_event(_event(fork))
        directory.ledger.create()
        if has_record(parent):
            record_inputs(directory, fork.config)
        directory.write_config(fork.config)


def _rows_per_step(config: RunConfig) -> int:
    return config.sft.num_rows if config.sft is not None else config.rollout.num_prompts


def _curriculum_of(config: RunConfig) -> tuple[object, ...] | None:
    """Return what a curriculum chooses among, in order; None: there is none."""
    data = config.data
    paths = tuple(source.path for source in data.train_sources)
    return None if data.curriculum is None else (data.source_names, paths)


def _event(fork: PlannedFork) -> RunEvent:
    from infra.engines.open import engine_versions  # not at the top: torch is imported with it

    reason = f"of run {fork.parent.run_id}, after {fork.step} steps"
    versions = installed_versions() | engine_versions(fork.config.rollout)
    device = next((event.device for event in reversed(fork.parent.metrics.events()) if event.device), None)
    return RunEvent(kind="fork", step=fork.step, time=time.time(), reason=reason, versions=versions, device=device)


def _check_changes(parent: RunDirectory, before: RunConfig, config: RunConfig, step: int) -> None:
    """Check that the parent's state is one that a run with `config` can go on with."""
    name = parent.run_id
    changed = [key for key in changed_keys(before, config) if key.split(".")[0] == "model" and not is_changeable(key)]
    if changed:
        raise RunError(
            f"a fork of run {name} has its model: {', '.join(changed)} can't change; start a new run with it"
        )
    if step and config.optim.kind != before.optim.kind:
        raise RunError(
            f"run {name} has the moments of optim.kind = {before.optim.kind} after its first step, with which "
            f'"{config.optim.kind}" can\'t go on; leave it, or fork after step 0'
        )
    if step and config.data.curriculum is not None and _curriculum_of(config) != _curriculum_of(before):
        raise RunError(
            f"run {name} has results and positions of another curriculum after its first step, or of none, with which "
            "the fork's can't go on: leave data.curriculum.kind, its field and starts, and names, paths and order of "
            "data.sources, or fork after step 0"
        )
    if config.steps <= step:
        raise RunError(
            f"a fork after step {step} with steps = {config.steps} would have nothing left to do; set it higher, e.g. "
            f"steps={step + 1}"
        )
    for each, key in ((before, f"run {name} has"), (config, "the fork would have")):
        if each.runtime.max_staleness > 1:
            raise RunError(
                f"{key} runtime.max_staleness = {each.runtime.max_staleness}, with which rows are sampled over several "
                "steps; only runs with 0 or 1 can be forked"
            )
    if step and config.runtime.max_staleness > before.runtime.max_staleness:
        raise RunError(
            f"run {name} has runtime.max_staleness = 0 and keeps no earlier weights, which 1 needs; leave it at 0"
        )
