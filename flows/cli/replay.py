"""`sluice replay`: what steps of a run give when they are computed again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli.diff import difference_cells
from flows.cli.terminal import plain_table, with_width
from flows.lifecycle.session import connect
from flows.replay.bundle import different_versions, opened_bundle
from flows.replay.replay import (
    StepChange,
    StepReplay,
    Steps,
    change_steps,
    changes_rewards,
    released,
    replay_config,
    score_steps,
    verify_steps,
)
from flows.replay.session import in_ray, new_scratch_id, replay_session
from infra.history.diff import Closeness, StageDiff, is_within, worst
from infra.history.past_weights import History
from infra.storage.lineage import owner_of_steps
from infra.storage.runs import RunDirectory
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, RunError

HEADER = ("stage", "column", "row", "token", "run", "replay", "different", "largest", "result")
MAX_ROWS = 5  # of a stage


def parse_steps(text: str) -> tuple[int, int]:
    """Return the first step of A:B and the step after the last one; a number alone is one step.

    Raises:
        RunError: It is neither.
    """
    first, colon, stop = text.partition(":")
    if not (first.isdecimal() and (stop.isdecimal() if colon else True)) or (colon and int(stop) <= int(first)):
        raise RunError(f"--steps {text} is neither a step, such as 7, nor steps A:B with A below B, counted from 0")
    return int(first), int(stop) if colon else int(first) + 1


def run_replay(
    console: Console,
    directory: RunDirectory,
    steps: str,
    overrides: Sequence[str],
    accepted: Closeness,
    *,
    rescores: bool,
    as_json: bool,
) -> bool:
    """Replay steps of a run and print what they give; return whether that is accepted, as it is with other settings.

    Raises:
        UserError: The steps can't be replayed, or not with these settings.
        PipelineError: What a stage raises.
    """
    first, stop = parse_steps(steps)
    directory = owner_of_steps(directory, first, stop)
    own, config, changed = replay_config(directory, overrides)
    found = Steps.find(History(directory), first, stop)
    rescores = rescores or changes_rewards(changed)
    if changed or rescores:
        changes = _what_changes(console, found, (own, config), rescores=rescores, as_json=as_json)
        if as_json:
            _print_json({"changed": changed, "steps": [change.model_dump() for change in changes]})
        return True
    replays = _verify(console, found, own, as_json=as_json)
    is_accepted = all(is_within(each.closeness, accepted) for each in replays)
    if as_json:
        _print_json({"same": is_accepted, "steps": [_as_json(each) for each in replays]})
    else:
        console.print(_verdict(replays), soft_wrap=True, markup=False, highlight=False)
    return is_accepted


def run_reproduction(
    console: Console, bundle: Path, overrides: Sequence[str], accepted: Closeness, *, as_json: bool
) -> bool:
    """Replay the step of a bundle and print what it gives, and which packages differ; return whether it is accepted.

    Raises:
        UserError: The bundle is damaged, unsafe or of a newer format; or an override is invalid.
        PipelineError: What a stage raises.
    """
    with opened_bundle(bundle) as (directory, manifest):
        own, _, changed = replay_config(directory, overrides)
        if changed:
            raise ConfigError(f"a bundle is reproduced as it was run; leave out {', '.join(changed)}")
        steps = Steps.find(History(directory), manifest.step, manifest.step + 1)
        (replay,) = _verify(console, steps, own, as_json=as_json)
        versions = different_versions(manifest)
    is_accepted = is_within(replay.closeness, accepted)
    if as_json:
        _print_json({"same": is_accepted, "versions": versions, "steps": [_as_json(replay)]})
        return is_accepted
    for name, (theirs, ours) in versions.items():
        console.print(f"{name}: {theirs} then, {ours} now", soft_wrap=True, markup=False, highlight=False)
    verdict = f"step {manifest.step} of run {manifest.run_id} reproduced: {replay.closeness}"
    console.print(verdict, soft_wrap=True, markup=False, highlight=False)
    return is_accepted


def _verify(console: Console, steps: Steps, config: RunConfig, *, as_json: bool) -> list[StepReplay]:
    source, found = steps.history.directory, list[StepReplay]()

    def report(step: StepReplay) -> None:
        found.append(step)
        if not as_json:
            _print_stages(console, step)

    with console.status("replaying"), replay_session(source, config, new_scratch_id(source.run_id)) as session:
        in_ray(verify_steps(session, steps, report))
    return found


def _what_changes(
    console: Console, steps: Steps, configs: tuple[RunConfig, RunConfig], *, rescores: bool, as_json: bool
) -> list[StepChange]:
    found: list[StepChange] = []

    def report(step: StepChange) -> None:
        found.append(step)
        if not as_json:
            _print_change(console, step)

    with console.status("replaying"):
        rollouts = (
            score_steps(steps.stored, configs[1]) if rescores else [released(of, of.rollout) for of in steps.stored]
        )
        connect(configs[0].services)
        in_ray(change_steps(steps, rollouts, configs, report))
    return found


def _as_json(step: StepReplay) -> dict[str, Any]:
    stages = [{**stage.model_dump(), "closeness": stage.closeness} for stage in step.stages]
    return {"step": step.step, "closeness": step.closeness, "stages": stages}


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))


def _verdict(replays: Sequence[StepReplay]) -> str:
    weights = [step.step + 1 for step in replays if any(stage.stage == "weights" for stage in step.stages)]
    compared = f"weights of version {', '.join(map(str, weights))} included" if weights else "no checkpoint to compare"
    first = next((step for step in replays if step.closeness != "same bits"), None)
    if first is None:
        return f"{len(replays):,} steps replayed: same bits ({compared})"
    stage = next(stage for stage in first.stages if stage.closeness != "same bits")
    return (
        f"{len(replays):,} steps replayed: {worst([step.closeness for step in replays])}, first in step "
        f"{first.step}, stage {stage.stage}, {stage.differences[0].column} ({compared})"
    )


def _print_stages(console: Console, step: StepReplay) -> None:
    same = [stage.stage for stage in step.stages if not stage.differences]
    others = [stage for stage in step.stages if stage.differences]
    line = f"step {step.step}: same bits in {', '.join(same)}" if same else f"step {step.step}"
    console.print(line, soft_wrap=True, markup=False, highlight=False)
    if others:
        table = plain_table(*HEADER, left=len(HEADER))
        for stage in others:
            _add_stage(table, stage)
        with_width(console).print(table)


def _add_stage(table: Table, stage: StageDiff) -> None:
    for found in stage.differences[:MAX_ROWS]:
        table.add_row(stage.stage, *difference_cells(found))
    if (more := len(stage.differences) - MAX_ROWS) > 0:
        table.add_row(stage.stage, f"and {more:,} more", *[""] * 6, stage.closeness)


def _print_change(console: Console, step: StepChange) -> None:
    update, advantages = step.update, step.advantages
    ratio, cosine = ("-" if value is None else f"{value:.6g}" for value in (update.norm_ratio, update.cosine))
    lines = [
        f"step {step.step}"
        + (": off-policy, as its rows were sampled by the run's weights" if step.is_off_policy else ""),
        f"  update      cosine {cosine}, norm {ratio} times the run's ({update.norm_b:.4g} and {update.norm_a:.4g})",
        f"  advantages  {advantages.num_changed:,} of {advantages.num_rows:,} changed, by at most "
        f"{advantages.largest:.4g}, {advantages.mean:.4g} on average"
        + (f"; {advantages.num_left_out:,} rows in one of the two only" if advantages.num_left_out else ""),
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    metrics = plain_table("metric", "run", "replay", left=1)
    for name, values in step.metrics.items():
        if not name.endswith("_seconds"):
            metrics.add_row(name, *("-" if value is None else f"{value:.6g}" for value in values))
    shifts = plain_table("row", "token", "text", "moved by the run", "by the replay", left=0)
    for shift in step.shifts:
        shifts.add_row(str(shift.row), str(shift.token), Text(repr(shift.text)), f"{shift.a:+.6f}", f"{shift.b:+.6f}")
    for table in (metrics, shifts):
        if table.row_count:
            with_width(console).print(table)
