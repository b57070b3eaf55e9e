"""`sluice replay`: steps of a run computed again from its stored columns, with its own settings or with others."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from flows.replay.reports import AdvantageChange, StepChange, StepReplay
from flows.replay.session import ReplayedStep, ReplaySession, new_scratch_id, replay_session
from infra.history.diff import StageDiff, compare_checkpoints, compare_updates, diff_columns, diff_metrics, diff_plans
from infra.history.moves import largest_moves
from infra.history.start import History, Start
from infra.history.steps import TokenTexts
from infra.history.stored import StoredStep
from schemas.catalog import REWARD_PART_PREFIX
from schemas.config.run import RunConfig
from schemas.metrics import merge_metrics, values
from schemas.rollout import RolloutHandle

MOVES = 5  # tokens that are reported of each step


@dataclass(frozen=True)
class Steps:
    """The steps of a run that are to be replayed, and what the weights before them are made of.

    Attributes:
        history: The run.
        start: What the weights before the first of them are made of.
        stored: The steps.
    """

    history: History
    start: Start
    stored: tuple[StoredStep, ...]

    @classmethod
    def find(cls, history: History, first: int, stop: int) -> "Steps":
        """Find steps `first` to `stop` - 1, with all of their columns checked.

        Raises:
            RunError: They can't be replayed, as columns or a checkpoint were not kept.
            StoreError: Columns are lost or damaged.
        """
        stored = tuple(history.steps(first, stop))
        return cls(history, history.start(first), stored)


async def verify_steps(session: ReplaySession, steps: Steps, report: Callable[[StepReplay], None]) -> None:
    """Replay steps with the run's own settings, and report how each compares with what the run stored.

    Raises:
        PipelineError: What a stage raises.
    """
    history = steps.history
    await session.begin(steps.start, history.checkpoints)
    complete = set(history.checkpoints.complete_versions())
    for stored in steps.stored:
        replayed = await session.replay(stored, stored.rollout)
        stages = _compare(session, history, stored, replayed)
        if stored.step + 1 in complete:
            await session.save(stored.step + 1)
            found = compare_checkpoints(history.checkpoints, session.checkpoints, stored.step + 1)
            stages.append(StageDiff(stage="weights", differences=found))
        report(StepReplay(step=stored.step, stages=tuple(stages)))


async def change_steps(
    steps: Steps,
    rollouts: Sequence[RolloutHandle],
    configs: tuple[RunConfig, RunConfig],
    report: Callable[[StepChange], None],
) -> None:
    """Replay steps as the run did them, then with other settings, and report what changes.

    Args:
        steps: The steps.
        rollouts: Their rows' scalars, with the rewards to use.
        configs: The run's, and the replay's.
        report: Called for each step.

    Raises:
        PipelineError: What a stage raises.
    """
    source, first = steps.history.directory, steps.stored[0].step
    with ExitStack() as stack:
        run = stack.enter_context(replay_session(source, configs[0], new_scratch_id(source.run_id)))
        await run.begin(steps.start, steps.history.checkpoints)
        await run.save(first)
        recorded = [await _repeat(run, stored) for stored in steps.stored]
        run.stop()
        changed = stack.enter_context(replay_session(source, configs[1], new_scratch_id(source.run_id)))
        await changed.begin(Start(first, True, ()), run.checkpoints)
        texts = TokenTexts(configs[0].model)
        for stored, rollout, moves in zip(steps.stored, rollouts, recorded, strict=True):
            before = await changed.logprobs(stored, stored.step, "before")
            replayed = await changed.replay(stored, rollout)
            own = before, await changed.logprobs(stored, stored.step + 1, "after")
            await changed.save(stored.step + 1)
            report(
                StepChange(
                    step=stored.step,
                    is_off_policy=stored.step > first,
                    update=compare_updates(run.checkpoints, changed.checkpoints, stored.step),
                    advantages=_compare_advantages(changed, steps.history, stored, replayed, rollout),
                    metrics=_changed_metrics(stored, replayed, rollout),
                    moves=largest_moves(stored, moves, own, texts.of, MOVES),
                )
            )


async def _repeat(session: ReplaySession, stored: StoredStep) -> tuple[pa.Array, pa.Array]:
    """Update as the run did, and save the version; return the log-probs of the step's tokens before and after."""
    before = await session.logprobs(stored, stored.step, "before")
    await session.repeat(stored)
    await session.save(stored.step + 1)
    return before, await session.logprobs(stored, stored.step + 1, "after")


def _compare(session: ReplaySession, history: History, stored: StoredStep, replayed: ReplayedStep) -> list[StageDiff]:
    found = _metrics(replayed, stored.rollout)
    common = [name for name in found if name in stored.report.metrics]
    return [
        *diff_columns([history.store, session.store], [stored.batch, replayed.batch], without="rollout"),
        diff_plans(stored.report.plan, replayed.advantage.plan.digest),
        diff_metrics("update", *({name: each[name] for name in common} for each in (stored.report.metrics, found))),
    ]


def _metrics(replayed: ReplayedStep, rollout: RolloutHandle) -> dict[str, float]:
    """Return the metrics of the stages that were computed again, and the means of the reward's parts."""
    found = values(merge_metrics([replayed.advantage.metrics, replayed.update.metrics]))
    parts = {name: value for name, value in values(rollout.metrics).items() if name.startswith(REWARD_PART_PREFIX)}
    return {**parts, **found}


def _changed_metrics(
    stored: StoredStep, replayed: ReplayedStep, rollout: RolloutHandle
) -> dict[str, tuple[float | None, float]]:
    before, after = stored.report.metrics, _metrics(replayed, rollout)
    return {name: (before.get(name), value) for name, value in after.items() if before.get(name) != value}


def _compare_advantages(
    session: ReplaySession, history: History, stored: StoredStep, replayed: ReplayedStep, rollout: RolloutHandle
) -> AdvantageChange:
    """Compare the advantages of the rows that both trained on."""
    whole = np.full((2, stored.rows.num_rows), np.nan)
    pairs = ((history.store, stored.batch, stored.rollout), (session.store, replayed.batch, rollout))
    for number, (store, batch, of) in enumerate(pairs):
        live = ~np.isnan(np.asarray(of.rewards, dtype=np.float64))
        whole[number, live] = store.read(batch, ["advantages"])["advantages"].to_numpy()
    both = ~np.isnan(whole).any(axis=0)
    gaps = np.abs(whole[1, both] - whole[0, both])
    return AdvantageChange(
        num_rows=int(both.sum()),
        num_changed=int((gaps > 0).sum()),
        largest=float(gaps.max(initial=0.0)),
        mean=float(gaps.mean()) if gaps.size else 0.0,
        num_left_out=int(np.isnan(whole).any(axis=0).sum() - np.isnan(whole).all(axis=0).sum()),
    )
