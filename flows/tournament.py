"""`sluice tournament`: methods compared on the same stored steps of a run, then by forks of it, half of which go on.

A method is a set of changes to the run's settings; the run's own settings take part as `own`. What is found is kept in
the run's directory, so that the same command goes on after an interruption.
"""

import asyncio
import json
import logging
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from math import inf
from typing import cast

from prefect import flow

from flows.configs import CONFIGS
from flows.deployments.entrypoints import hold_pool
from flows.lifecycle.cancellation import cancellable
from flows.replay.fork import PlannedFork, plan_fork
from flows.replay.replay import OF_METHOD, OWN, REPLAYED_SECTIONS, StepFigures, Steps, compare_methods, replay_config
from flows.replay.session import in_ray
from infra.history.past_weights import History
from infra.storage import places
from infra.storage.folder import read_record
from infra.storage.lineage import load_fork, owner_of_steps
from infra.storage.runs import RunDirectory
from rl_core.training.optimizer import learning_rate
from schemas.base import Frozen
from schemas.config.changes import rejected_changes
from schemas.config.load import load_config, override_config
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, RunError
from schemas.step import averaged_steps, mean_of
from tasks.stage import operation

logger = logging.getLogger(__name__)

FORK_STEPS = 10
NUM_STEPS = 4  # that are compared unless others are asked for
# With another reward, what methods are compared by would be another thing for each.
SECTIONS = tuple(section for section in REPLAYED_SECTIONS if section != "reward")
BUILT_IN = {path.stem: path for path in sorted(CONFIGS.glob("*.toml")) if not path.stem.startswith("demo")}
# What a built-in config's method is; what else it has depends on the lengths, the batch and the model that it is for.
BUILT_IN_SECTIONS = ("advantage", "loss", "kl")
# A short fork has not the steps that a profile names, and nobody is asked whether it may go on.
UNATTENDED = ("runtime.profile_steps=[]", "approval.when=[]", "approval.on_failed_queries=false")
CHILD = "from infra.processes import lifeline; lifeline.end_with_parent(); from flows.cli import main; main.main()"


class Method(Frozen):
    """Changes to a run's settings, and what is known of them so far."""

    name: str
    overrides: tuple[str, ...]  # one `section.key=value` each
    figures: tuple[StepFigures, ...] = ()
    failure: str = ""  # why its fork can't go on


class Tournament(Frozen):
    """The content of `tournament-NAME.json` in a run's directory."""

    name: str
    first: int  # of the steps that methods are compared on
    stop: int  # after the last one
    at: int  # how many of the run's steps the forks have
    fork_steps: int  # of the first round
    methods: dict[str, Method]
    # Of the run when the tournament was begun, see `_kept_rate`; None: an earlier Sluice began it, and rates decay.
    num_steps: int | None = None

    def save(self, directory: RunDirectory) -> None:
        """Write it."""
        directory.folder.write(f"{file_name(self.name)}.json", self.model_dump_json(indent=2).encode())

    def with_method(self, method: Method) -> "Tournament":
        """Return it with a method added, or replaced."""
        return self.replace(methods={**self.methods, method.name: method})

    def fork_of(self, directory: RunDirectory, method: str) -> RunDirectory:
        """Return where a method's fork is, or will be: next to the run."""
        return RunDirectory(places.join(directory.runs_dir, f"{directory.run_id}-{self.name}-{method}"))


class Standing(Frozen):
    """How a fork stands at the end of a round."""

    method: str
    run_id: str
    accuracy: float | None  # held-out, at the round's end; None: the run isn't evaluated
    reward: float | None  # mean of the last half of the fork's own steps, of at most ten
    failure: str = ""


class Round(Frozen):
    """Forks of the same length, the best first; those after `num_kept` don't go on."""

    stop: int  # how many steps they have
    standings: tuple[Standing, ...]
    num_kept: int


def file_name(name: str) -> str:
    """Return the name of a tournament's files in the run's directory, without their suffix."""
    return f"tournament-{name}"


def parse_methods(texts: Sequence[str]) -> tuple[Method, ...]:
    """Return methods given as `NAME` of a built-in config, `NAME:KEY=VALUE,...`, or both; `own` is the first one.

    Raises:
        ConfigError: A name is unknown, not the end of a run's id, or given twice; or a setting is not a method's.

    Example:
        >>> parse_methods(["slow:optim.lr=1e-7,optim.betas=[0.9,0.99]"])[1].overrides
        ('optim.lr=1e-7', 'optim.betas=[0.9,0.99]')
    """
    methods = [Method(name=OWN, overrides=())]
    for text in texts:
        method = _parse_method(text)
        if method.name in [other.name for other in methods]:
            reason = "the run's own settings take part as it" if method.name == OWN else "it is given twice"
            raise ConfigError(f"method {text!r}: {reason}; choose another name, e.g. slow:optim.lr=1e-7")
        methods.append(method)
    return tuple(methods)


def _parse_method(text: str) -> Method:
    name, colon, changes = text.partition(":")
    _check_name(name, f"method {text!r}: its name", "slow:optim.lr=1e-7")
    overrides = _built_in(name)
    overrides += re.split(r",(?=[\w.]+=)", changes) if changes else []  # a list's commas stay
    if not overrides or (colon and not changes):
        raise ConfigError(
            f"method {text!r} is neither built in ({', '.join(BUILT_IN)}) nor has changes; write e.g. "
            f"{name}:loss.kind=cispo,loss.clip_high=4"
        )
    for override in overrides:
        if override.partition(".")[0] not in SECTIONS:
            raise ConfigError(
                f"method {text!r}: {override.partition('=')[0]} is not a setting of a method; those are in "
                f"{', '.join(SECTIONS)}, and all others are the same for all methods"
            )
    return Method(name=name, overrides=tuple(overrides))


def _check_name(name: str, what: str, example: str) -> None:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise ConfigError(
            f"{what} must be of lower-case letters, digits, - and _, as it is a part of runs' ids; e.g. {example}"
        )


def _built_in(name: str) -> list[str]:
    """Return the settings of a built-in config's method; none if there is no such config."""
    if name not in BUILT_IN:
        return []
    config = load_config(BUILT_IN[name])
    sections = {section: getattr(config, section).model_dump(mode="json") for section in BUILT_IN_SECTIONS}
    return [f"{place}.{key}={json.dumps(value)}" for place, found in sections.items() for key, value in found.items()]


def method_configs(directory: RunDirectory, methods: Sequence[Method]) -> dict[str, RunConfig]:
    """Return the config of each method's replay.

    Raises:
        ConfigError: A setting is invalid, or two methods have the same ones.
        RunError: The run has no methods to compare.
    """
    if directory.config().sft is not None:
        raise RunError(f"run {directory.run_id} is supervised fine-tuning, which has no other methods to compare")
    configs: dict[str, RunConfig] = {}
    for method in methods:
        _, config, _ = replay_config(directory, method.overrides)
        if same := next((name for name, other in configs.items() if other == config), None):
            raise ConfigError(f"method {method.name} has the same settings as {same}; leave one of them out")
        configs[method.name] = config
    return configs


def open_tournament(
    directory: RunDirectory,
    name: str,
    methods: Sequence[Method],
    steps: tuple[int, int] | None = None,
    at: int | None = None,
    fork_steps: int | None = None,
) -> Tournament:
    """Return the run's tournament of that name, or a new one; nothing is written.

    Args:
        directory: The run.
        name: The tournament's name.
        methods: Those that take part; it may know of others, which took part before.
        steps: The first step to compare on, and the one after the last; None: as before, or the newest ones.
        at: How many of the run's steps the forks have; None: as before, or as many as can be had.
        fork_steps: Of the first round; None: as before, or `FORK_STEPS`.

    Raises:
        ConfigError: The name can't be a part of a run's id.
        RunError: It was begun with other values; or no step can be replayed.
    """
    _check_name(name, f"--name {name!r}", "t2")
    found = read_record(directory.folder, f"{file_name(name)}.json", Tournament, "remove it, or give another --name")
    if found is None:
        history = History(directory)
        at = max(history.possible_versions(), default=0) if at is None else at
        first, stop = steps or history.newest_steps(NUM_STEPS)
        sizes = {"fork_steps": fork_steps or FORK_STEPS, "num_steps": directory.config().steps}
        found = Tournament(name=name, first=first, stop=stop, at=at, methods={}, **sizes)
    asked = {"--steps": steps, "--at": at, "--fork-steps": fork_steps}
    known = {"--steps": (found.first, found.stop), "--at": found.at, "--fork-steps": found.fork_steps}
    other = [option for option, value in asked.items() if value not in (None, known[option])]
    other += [f"method {m.name}" for m in methods if m.overrides != found.methods.get(m.name, m).overrides]
    if other:
        raise RunError(
            f"tournament {name} of run {directory.run_id} was begun with another {', '.join(other)}; leave that as it "
            "was, or give --name for another tournament"
        )
    return found.replace(methods={method.name: method for method in methods} | found.methods)


def add_figures(directory: RunDirectory, tournament: Tournament, names: Sequence[str]) -> Tournament:
    """Compute what each method's update of each stored step does, unless that is known; write each as it is found.

    Raises:
        UserError: Steps can't be replayed, or not with these settings.
        PipelineError: What a stage raises.
    """
    configs = method_configs(directory, [tournament.methods[name] for name in names])
    missing = {name: config for name, config in configs.items() if not tournament.methods[name].figures}
    if not missing:
        return tournament
    owner = owner_of_steps(directory, tournament.first, tournament.stop)
    if owner.url != directory.url:
        raise RunError(
            f"steps {tournament.first} to {tournament.stop - 1} are those of run {owner.run_id}, from before run "
            f"{directory.run_id} was forked; hold the tournament there, or choose other steps"
        )

    def add(name: str, figures: tuple[StepFigures, ...]) -> None:
        nonlocal tournament
        tournament = tournament.with_method(tournament.methods[name].replace(figures=figures))
        tournament.save(directory)

    steps = Steps.find(History(directory), tournament.first, tournament.stop)
    in_ray(compare_methods(steps, missing, add))
    return tournament


def plan_forks(directory: RunDirectory, tournament: Tournament, names: Sequence[str]) -> list[PlannedFork]:
    """Check that the methods' forks can be made, and return those that don't exist yet; nothing is made.

    Raises:
        UserError: One can't be made, or would learn nothing; or a run of its id exists and is something else.
    """
    own, planned = directory.config(), []
    for name in names:
        fork, method = tournament.fork_of(directory, name), tournament.methods[name]
        changes = (*method.overrides, *UNATTENDED, f"steps={tournament.at + tournament.fork_steps}")
        wanted = override_config(own, changes, directory.run_id)
        if tournament.num_steps is not None and wanted.optim.schedule != "constant":
            changes += _kept_rate(wanted, name, tournament.at, tournament.num_steps)
            wanted = override_config(own, changes, directory.run_id)
        if not fork.exists:
            planned.append(plan_fork(directory, tournament.at, fork.run_id, overrides=changes))
            continue
        origin = load_fork(fork)
        is_it = origin is not None and (origin.run_id, origin.step) == (directory.run_id, tournament.at)
        if not is_it or rejected_changes(wanted, fork.config()):
            raise RunError(
                f"run {fork.run_id} exists, and is no fork of {directory.run_id}@{tournament.at} with the settings of "
                f"method {name}; remove it, or give --name for another tournament"
            )
    return planned


def _kept_rate(config: RunConfig, name: str, at: int, num_steps: int) -> tuple[str, ...]:
    """Return changes with which a method's fork keeps the learning rate that a run of `num_steps` steps has after `at`.

    Over the few steps of a round, its schedule would decay from almost nothing to 0.
    """
    after_warmup = config.optim.warmup_updates  # with which the fork goes on if it isn't over
    rate = learning_rate(config.optim, after_warmup, at, 0, num_steps)
    if not rate:
        raise RunError(
            f"method {name} has optim.schedule = {config.optim.schedule!r}, whose learning rate is 0 after step {at} "
            f"of {num_steps}, so that a fork would learn nothing: give an earlier step with --at, or fork the run with "
            "optim.schedule=constant, and hold the tournament of that run"
        )
    return ("optim.schedule=constant", f"optim.lr={rate!r}")


def rank(standings: Sequence[Standing], stop: int) -> Round:
    """Rank forks by held-out accuracy, then reward, those that failed last, equal ones as they are; half are kept.

    Raises:
        RunError: All have failed.
    """

    def score(standing: Standing) -> tuple[float, ...]:
        found = (standing.accuracy, standing.reward)
        return (not standing.failure, *(-inf if value is None else value for value in found))

    best_first = sorted(standings, key=score, reverse=True)
    num_good = sum(not standing.failure for standing in standings)
    if not num_good:
        raise RunError(f"no fork reached step {stop}, e.g. {standings[0].run_id}: {standings[0].failure}")
    return Round(stop=stop, standings=tuple(best_first), num_kept=min(-(-len(best_first) // 2), num_good))


def final_order(rounds: Sequence[Round]) -> list[Standing]:
    """Return the forks of the last round, then those that each earlier one dropped: the best first."""
    return [*rounds[-1].standings, *(each for of in reversed(rounds[:-1]) for each in of.standings[of.num_kept :])]


@flow(name="tournament", flow_run_name="{run_id}-{name}", persist_result=False, retries=0)
async def hold_tournament(run_id: str, runs_dir: str, name: str, methods: tuple[str, ...]) -> tuple[Round, ...]:
    """Train the forks of a run's tournament by successive halving, as many at a time as the pool has slots.

    What a fork has done already isn't repeated: the flow can be run again after any interruption.

    Raises:
        RunError: A fork stopped for a reason that is not its method's, or was changed; or no fork could go on.
    """
    directory = RunDirectory.open(run_id, runs_dir)
    halving = _halve(directory, open_tournament(directory, name, ()), methods)
    return cast(tuple[Round, ...], await cancellable(halving))  # or a state, with which Prefect ends a cancelled one


async def _halve(directory: RunDirectory, tournament: Tournament, methods: Sequence[str]) -> tuple[Round, ...]:
    forks = {method: tournament.fork_of(directory, method) for method in methods}
    rounds, going = list[Round](), tuple(methods)
    stop, length = tournament.at, tournament.fork_steps
    while len(going) > 1:
        stop, length = stop + length, 2 * length
        waiting = [each for each in going if not (tournament.methods[each].failure or is_trained(forks[each], stop))]
        training = [train_fork.named(f"{each} to step {stop}")(forks[each].url, stop) for each in waiting]
        outcomes = await asyncio.gather(*training, return_exceptions=True)  # others finish what they have begun
        for method, outcome in zip(waiting, outcomes, strict=True):
            if isinstance(outcome, str) and outcome:
                tournament = tournament.with_method(tournament.methods[method].replace(failure=outcome))
                tournament.save(directory)
        if error := next((each for each in outcomes if isinstance(each, BaseException)), None):
            raise error
        for method in going:
            if tournament.methods[method].failure or is_trained(forks[method], stop):
                continue
            done = forks[method].metrics.num_steps()
            advice = "once that has ended, the same command goes on"
            if done > stop:
                advice = f"there is no evaluation after {stop}: remove that run, or leave its method out"
            raise RunError(
                f"run {forks[method].run_id}, a fork of the tournament, has {done} of {stop} steps, or not the "
                f"evaluation after them, although it was trained: another process has changed it; {advice}"
            )
        rounds.append(rank([_standing(tournament, each, forks[each], stop) for each in going], stop))
        going = tuple(standing.method for standing in rounds[-1].standings[: rounds[-1].num_kept])
    return tuple(rounds)


def is_trained(fork: RunDirectory, stop: int) -> bool:
    """Return whether a fork has `stop` steps and, if it is evaluated, the evaluation after them."""
    if fork.metrics.num_steps() < stop:
        return False
    return not fork.config().data.eval_path or any(each.policy_version == stop for each in fork.metrics.evals())


def _standing(tournament: Tournament, method: str, fork: RunDirectory, stop: int) -> Standing:
    if not is_trained(fork, stop):
        failure = tournament.methods[method].failure
        return Standing(method=method, run_id=fork.run_id, accuracy=None, reward=None, failure=failure)
    window = range(stop - averaged_steps(stop - tournament.at), stop)
    return Standing(
        method=method,
        run_id=fork.run_id,
        accuracy=next((each.accuracy for each in fork.metrics.evals() if each.policy_version == stop), None),
        reward=mean_of([report for report in fork.metrics.steps() if report.step in window], "reward"),
    )


@operation("train-fork")
async def train_fork(fork: str, stop: int) -> str:
    """Train a fork until it has `stop` steps, in a process of its own that ends with this one; return why it stops.

    Raises:
        RunError: The fork stopped for a reason that is not its method's.
    """
    directory = RunDirectory(fork)
    async with hold_pool(directory.config(), shows_queue=False):
        logger.info("training run %s to step %d", directory.run_id, stop)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", CHILD, "resume", fork, f"steps={stop}"),
            stdin=PIPE,  # the lifeline
            stdout=DEVNULL,  # the run's driver.log has all lines
            stderr=PIPE,
            process_group=0,
        )
        assert process.stderr is not None
        try:
            printed = (await process.stderr.read()).decode(errors="replace")
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
    if code == 0:
        return ""
    reason = next((line for line in reversed(printed.splitlines()) if line.strip()), f"exit code {code}")
    if any(reason.startswith(f"stopped: {kind.__name__}: ") for kind in OF_METHOD):
        return reason.removeprefix("stopped: ").partition("; resume with: ")[0]
    raise RunError(
        f"run {directory.run_id}, a fork of the tournament, ended before step {stop} ({reason}); the same command goes "
        "on, also without this method"
    )
