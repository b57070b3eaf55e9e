"""`sluice replay`: steps of a run computed again from its stored columns, with its own settings or with others."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from flows.replay.session import ReplayedStep, ReplaySession, new_scratch_id, replay_session
from infra.history.diff import Closeness, StageDiff, diff_columns, diff_metrics, diff_plans, worst
from infra.history.kept_run import TokenTexts
from infra.history.past_weights import History, Start
from infra.history.stored_step import StoredStep, with_rewards
from infra.history.weights import LogprobShift, UpdateChange, compare_checkpoints, compare_updates, largest_shifts
from infra.rewards.base import RewardScorer
from infra.rewards.open import open_reward_scorer
from infra.storage.runs import RunDirectory
from infra.workers.reward import open_model_here
from rl_core.columns.jagged import flat_values
from rl_core.losses.base import MAX_LOG_RATIO
from rl_core.rewards import RewardItem, as_stored
from schemas.base import Frozen
from schemas.catalog import REWARD_PART_PREFIX
from schemas.config.changes import is_changeable
from schemas.config.load import changed_keys, override_config
from schemas.config.reward import RewardConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, NonFiniteError, PlanError, describe
from schemas.metrics import EffectiveFraction, merge_metrics, values
from schemas.rollout import RolloutHandle, check_failures

Computed = TypeVar("Computed")
Move = tuple[pa.Array, pa.Array]  # the log-probs of a step's tokens before and after an update, nats

NUM_SHIFTS = 5  # tokens that are reported of each step
OWN = "own"  # the method that a run itself is trained by
OF_METHOD = (NonFiniteError, PlanError)  # errors that say something of a method
UPDATE_METRICS = ("loss", "clip_fraction", "grad_norm")  # that are reported of a method's update
# Of the stages after the rollout: with other ones, the same rows are trained on.
REPLAYED_SECTIONS = ("reward", "advantage", "overlong", "kl", "distillation", "correction", "loss", "optim")
# What of a teacher the rollout has written into the rows: the prompts that it reads.
_OF_ROWS = re.compile(r"distillation\.teachers\.\w+(\.(prompt|max_prompt_tokens|data_sources))?")
# By whom and where these are computed, which may change results by rounding; only keys that a resume may change, too.
PLACE_KEYS = ("packing.", "runtime.", "services.", "timeouts.", "model.gradient_checkpointing")
REWARD_COLUMNS = ("prompt_text", "response_text", "answer", "info")


class StepReplay(Frozen):
    """A step that was computed again with the run's own settings, and compared with what the run stored."""

    step: int
    stages: tuple[StageDiff, ...]  # all that were compared, in order; A is the run, B the replay

    @property
    def closeness(self) -> Closeness:
        """The least close of its stages."""
        return worst([stage.closeness for stage in self.stages])


class AdvantageChange(Frozen):
    """How advantages changed, of the N rows that both trained on."""

    num_rows: int
    num_changed: int
    largest: float  # of the absolute differences
    mean: float  # of the absolute differences, over the N rows
    num_left_out: int = 0  # rows whose reward failed in one of the two only


class StepChange(Frozen):
    """A step that was computed again with other settings: what changes against what the run did."""

    step: int
    is_off_policy: bool  # its rows were sampled by other weights than those that the replay updates
    update: UpdateChange  # A is the run's, B the replay's
    advantages: AdvantageChange
    metrics: dict[str, tuple[float | None, float]]  # of the run and the replay, where they differ
    shifts: tuple[LogprobShift, ...]


class StepFigures(Frozen):
    """What a method's update of one stored step does, from the weights and the optimizer that the run had there."""

    step: int
    update: UpdateChange | None = None  # B is the method's, A the run's own; None: it failed
    ess: float | None = None  # effective sample size of exp(log-prob after the update - sampler's), fraction of tokens
    metrics: dict[str, float] = Field(default_factory=dict)  # `UPDATE_METRICS` of the update
    shifts: tuple[LogprobShift, ...] = ()  # B is the method's, A the run's own
    failure: str = ""


@dataclass(frozen=True)
class Steps:
    """The steps of a run that are to be replayed, and what the weights before them are made of."""

    history: History  # the run
    start: Start  # what the weights before the first of them are made of
    stored: tuple[StoredStep, ...]  # the steps

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
        stored.release()


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
        for stored, rollout, shifts in zip(steps.stored, rollouts, recorded, strict=True):
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
                    shifts=largest_shifts(stored, shifts, own, texts.of, NUM_SHIFTS),
                )
            )
            stored.release()


async def _repeat(session: ReplaySession, stored: StoredStep) -> Move:
    """Update as the run did, and save the version; return the log-probs of the step's tokens before and after."""
    before = await session.logprobs(stored, stored.step, "before")
    await session.repeat(stored)
    await session.save(stored.step + 1)
    return released(stored, (before, await session.logprobs(stored, stored.step + 1, "after")))


async def compare_methods(
    steps: Steps, configs: Mapping[str, RunConfig], report: Callable[[str, tuple[StepFigures, ...]], None]
) -> None:
    """Replay each of the steps by each method, always from the weights and the optimizer that the run had before it.

    Args:
        steps: The steps.
        configs: The methods' by name; that of `OWN` is the run's, whose update of a step is not computed, but repeated.
        report: Called for each method.

    Raises:
        PipelineError: What a stage raises, unless it says something of the method: that is one of its figures.
    """
    source = steps.history.directory
    own = source.config()
    texts = TokenTexts(own.model)
    with replay_session(source, own, new_scratch_id(source.run_id)) as run:
        await run.begin(steps.start, steps.history.checkpoints)
        await run.save(steps.stored[0].step)
        moves = [await _repeat(run, stored) for stored in steps.stored]
        run.stop()
        pairs = list(zip(steps.stored, moves, strict=True))
        if OWN in configs:
            found = [_figures(run, run, of, of.report.metrics, move, move, texts) for of, move in pairs]
            report(OWN, tuple(found))
        for name in [name for name in configs if name != OWN]:
            with replay_session(source, configs[name], new_scratch_id(source.run_id)) as session:
                report(name, tuple([await _replay_method(run, session, of, move, texts) for of, move in pairs]))


async def _replay_method(
    run: ReplaySession, session: ReplaySession, stored: StoredStep, own_move: Move, texts: TokenTexts
) -> StepFigures:
    """Replay a step by a method, from the weights that the run had before it."""
    try:
        await session.rewind(run.checkpoints, stored.step)
        replayed = await session.replay(stored, stored.rollout)
        move = own_move[0], await session.logprobs(stored, stored.step + 1, "after")
        await session.save(stored.step + 1)
    except OF_METHOD as error:
        session.stop()  # its workers hold no version any more
        return StepFigures(step=stored.step, failure=describe(error))
    return _figures(run, session, stored, values(replayed.update.metrics), own_move, move, texts)


def _figures(
    run: ReplaySession,
    session: ReplaySession,
    stored: StoredStep,
    metrics: Mapping[str, float],
    own_move: Move,
    move: Move,
    texts: TokenTexts,
) -> StepFigures:
    """Compare the update that a session has saved with the run's own."""
    update = compare_updates(run.checkpoints, session.checkpoints, stored.step)
    trained = flat_values(stored.columns["loss_mask"])
    gaps = flat_values(move[1]).astype(np.float64) - flat_values(stored.columns["sampler_logprobs"])
    weights = np.exp(np.minimum(gaps[trained], MAX_LOG_RATIO))
    ess = EffectiveFraction(total=weights.sum(), squares=(weights**2).sum(), count=len(weights))
    shifts = largest_shifts(stored, own_move, move, texts.of, NUM_SHIFTS)
    stored.release()
    return StepFigures(
        step=stored.step,
        update=update,
        ess=ess.value,
        metrics={name: metrics[name] for name in UPDATE_METRICS if name in metrics},
        shifts=shifts,
    )


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


def replay_config(directory: RunDirectory, overrides: Sequence[str]) -> tuple[RunConfig, RunConfig, tuple[str, ...]]:
    """Return the config of the run, that of the replay, and the dotted keys in which the replay trains differently.

    The first has the replay's places of computation, so that the two differ in these keys only.

    Raises:
        ConfigError: An override is invalid, or would change the rows.
    """
    before = directory.config()
    after = override_config(before, overrides, directory.run_id)
    changed = changed_keys(before, after)
    if rejected := [
        key for key in changed if not (_is_section(key) or (key.startswith(PLACE_KEYS) and is_changeable(key)))
    ]:
        raise ConfigError(
            f"a replay uses the rows that run {directory.run_id} stored, which a different {', '.join(rejected)} would "
            f"change or doesn't affect; sluice fork starts a run that goes on with it. What a replay may change: "
            f"{', '.join(REPLAYED_SECTIONS)}"
        )
    places = before.replace(
        runtime=after.runtime,
        services=after.services,
        timeouts=after.timeouts,
        packing=after.packing,
        model=after.model,
    )
    return places, after, tuple(key for key in changed if _is_section(key) and not is_changeable(key))


def changes_rewards(changed: Sequence[str]) -> bool:
    """Return whether rewards have to be computed again if these keys differ."""
    return any(key == "reward" or key.startswith("reward.") for key in changed)


def _is_section(key: str) -> bool:
    return key.split(".")[0] in REPLAYED_SECTIONS and not _OF_ROWS.fullmatch(key)


def score_steps(steps: Sequence[StoredStep], config: RunConfig) -> list[RolloutHandle]:
    """Return the steps' rollouts with the rewards that a config's function gives their rows.

    Raises:
        ConfigError: They can't be computed from the steps' columns.
        RewardImportError: The function can't be loaded.
        RewardFailureError: More rewards of a step failed than the config allows.
    """
    for stored in steps:
        _check_texts(stored)
    open_model = partial(open_model_here, date=config.data.date)
    with closing(open_reward_scorer(config.reward, open_model)) as scorer:
        scorer.wait_until_ready()
        return [released(stored, _score(stored, scorer, config.reward)) for stored in steps]


def released(stored: StoredStep, found: Computed) -> Computed:
    """Return what was computed of a step's columns, which are freed."""
    stored.release()
    return found


def _check_texts(stored: StoredStep) -> None:
    """Check that a step's rewards can be computed from its columns: no environment answered, and texts are there."""
    if stored.has_turns:
        raise ConfigError(
            f"the rewards of step {stored.step} can't be computed again: they depend on an environment, whose state "
            "isn't stored; leave the reward as it is"
        )
    if not any(stored.columns["response_text"].to_pylist()):
        raise ConfigError(
            f"the rewards of step {stored.step} can't be computed again: its texts were left out; leave the reward as "
            "it is"
        )


def _score(stored: StoredStep, scorer: RewardScorer, config: RewardConfig) -> RolloutHandle:
    """Return the step's rollout with the rewards that a scorer gives its N rows, rounded as columns are."""
    texts = zip(*(stored.columns[name].to_pylist() for name in REWARD_COLUMNS), strict=True)
    items = [RewardItem(prompt, response, answer, json.loads(info)) for prompt, response, answer, info in texts]
    outcomes = scorer.score(items, stored.columns["group_id"].to_pylist())
    failure = next((outcome.failure for outcome in outcomes if outcome.failure is not None), None)
    rewards = [outcome.reward for outcome in outcomes]
    check_failures(rewards, failure, config.max_failure_fraction, f"step {stored.step}")
    names = sorted({name for outcome in outcomes for name in outcome.parts})
    parts = {name: [as_stored(outcome.parts.get(name)) for outcome in outcomes] for name in names}
    return with_rewards(stored.rollout, [as_stored(reward) for reward in rewards], parts)
