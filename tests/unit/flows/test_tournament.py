"""What takes part in a `sluice tournament`, what it refuses on one line, and how it ranks forks."""

import asyncio
import json
import os
import shutil
from contextlib import nullcontext
from math import cos, pi
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import tournament
from flows.configs import CONFIGS, find_config
from flows.replay.fork import make_fork
from flows.replay.replay import StepFigures
from flows.tournament import (
    Standing,
    Tournament,
    final_order,
    open_tournament,
    parse_methods,
    plan_forks,
    rank,
    train_fork,
)
from infra.checkpoints import open_checkpoints
from infra.history.past_weights import History
from infra.history.weights import LogprobShift, UpdateChange
from infra.storage.driver_lock import file_lock
from infra.storage.lineage import Fork, save_fork
from infra.storage.runs import RunDirectory
from rl_core.training.optimizer import learning_rate
from schemas.config.load import load_config, override_config
from schemas.errors import RunError
from schemas.step import StepReport
from tests.support.checkpoint_tensors import save
from tests.support.command import Command, assert_rejected, make_command
from tests.support.configs import run_config
from tests.support.small_run import columns_of, make_small_run

BUILT_IN = sorted(path.stem for path in CONFIGS.glob("*.toml") if not path.stem.startswith("demo"))


@pytest.fixture
def sluice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Commands in a folder with a run of four steps: the columns of the last two are kept, and versions 2 and 4."""
    monkeypatch.chdir(tmp_path)
    run = make_small_run()
    for step in range(4):
        report = StepReport(step=step, policy_version=step + 1, metrics={}, seconds=1.0, seconds_by_phase={})
        run.metrics.append_step(report)
    for version in (2, 4):
        save(open_checkpoints(run, run.config().checkpoint), version)
    return make_command(monkeypatch, capsys)


def standing(method: str, accuracy: float | None = None, reward: float | None = None, failure: str = "") -> Standing:
    return Standing(method=method, run_id=f"demo-t-{method}", accuracy=accuracy, reward=reward, failure=failure)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_method_is_its_advantage_loss_and_kl_whatever_the_run_has(tmp_path: Path, name: str) -> None:
    _, method = parse_methods([name])
    own = run_config(tmp_path, loss={"clip_low": 0.5, "dual_clip": 3.0}, kl={"coef": 0.5, "estimator": "k2"})
    found, expected = override_config(own, method.overrides, "demo"), load_config(find_config(name))
    assert (found.advantage, found.loss, found.kl) == (expected.advantage, expected.loss, expected.kl)
    assert (found.optim, found.overlong, found.rollout) == (own.optim, own.overlong, own.rollout)


def test_changes_follow_a_built_in_method() -> None:
    own, wide = parse_methods(["gspo:loss.clip_high=0.01,optim.betas=[0.9,0.99]"])
    assert (own.name, own.overrides) == ("own", ())
    assert 'loss.kind="gspo"' in wide.overrides
    assert wide.overrides[-2:] == ("loss.clip_high=0.01", "optim.betas=[0.9,0.99]")


def test_methods_that_cannot_take_part(sluice: Command) -> None:
    tournament = ("tournament", "demo", "--no-forks")
    assert_rejected(sluice(*tournament, "cisp"), "'cisp' is neither built in (cispo, dapo,", "nor has changes")
    assert_rejected(sluice(*tournament, "gspo:"), "nor has changes")
    assert_rejected(sluice(*tournament, "../gspo:optim.lr=1"), "its name must be of lower-case letters")
    assert_rejected(sluice(*tournament, "gspo", "gspo:optim.lr=1"), "it is given twice")
    assert_rejected(sluice(*tournament, "own:optim.lr=1"), "the run's own settings take part as it")
    assert_rejected(
        sluice(*tournament, "hot:rollout.temperature=2"), "rollout.temperature is not a setting of a method"
    )
    assert_rejected(sluice(*tournament, "easy:reward.kind=length"), "reward.kind is not a setting of a method")
    assert_rejected(sluice(*tournament, "high:optim.lrr=1"), "optim.lrr", "did you mean 'lr'?")
    assert_rejected(sluice(*tournament, "a:optim.lr=1", "b:optim.lr=1.0"), "method b has the same settings as a")
    assert_rejected(sluice(*tournament, "same:loss.kind=clipped"), "method same has the same settings as own")
    assert not list(Path("runs/demo").glob("tournament-*"))


def test_steps_and_forks_that_cannot_be_had(sluice: Command) -> None:
    before = sorted(Path("runs").iterdir())
    tournament = ("tournament", "demo", "cispo")
    assert_rejected(sluice(*tournament, "--no-forks", "--steps", "1:3"), "doesn't keep the columns of step 1", "2 to 3")
    assert_rejected(sluice(*tournament, "--steps", "3:2"), "--steps 3:2 is neither a step")
    assert_rejected(sluice(*tournament, "--at", "1"), "version 1 of run demo can't be had again")
    assert_rejected(sluice(*tournament, "--at", "9"), "finished 4 steps, so that it has no version 9 yet")
    assert_rejected(sluice(*tournament, "--name", "../t"), "--name '../t' must be of lower-case letters")
    assert sorted(Path("runs").iterdir()) == before


def test_what_is_not_given_is_the_newest_that_can_be_had(sluice: Command) -> None:
    directory = RunDirectory("runs/demo")
    found = open_tournament(directory, "t", parse_methods(["cispo"]))
    assert (found.first, found.stop, found.at, found.fork_steps) == (2, 4, 4, 10)
    (fork,) = plan_forks(directory, found, ["cispo"])
    planned = (fork.directory.run_id, fork.step, fork.config.steps, fork.config.loss.kind)
    assert planned == ("demo-t-cispo", 4, 14, "cispo")


@pytest.mark.parametrize(("schedule", "factor"), [("linear", 0.75), ("cosine", (1 + cos(pi / 4)) / 2), ("constant", 1)])
def test_forks_keep_the_rate_that_the_run_has_there(sluice: Command, schedule: str, factor: float) -> None:
    directory = RunDirectory("runs/demo")
    directory.write_config(override_config(directory.config(), [f"optim.schedule={schedule}", "steps=8"], ""))
    methods = parse_methods(["fast:optim.lr=1.0", "warm:optim.warmup_updates=3,loss.kind=cispo"])
    known = open_tournament(directory, "t", methods, at=2)
    names = ("own", "fast", "warm")
    own, fast, warm = (fork.config for fork in plan_forks(directory, known, names))
    assert (own.optim.schedule, own.optim.lr) == ("constant", pytest.approx(1e-6 * factor))
    run = directory.config().optim
    expected = pytest.approx(learning_rate(run, 2, 2, 0, 8))
    for step, num_steps in ((2, 12), (11, 12), (12, 32), (31, 32)):  # of both rounds
        assert learning_rate(own.optim, step, step, 0, num_steps) == expected
    assert (fast.optim.schedule, fast.optim.lr) == ("constant", pytest.approx(factor))
    assert learning_rate(warm.optim, 2, 2, 0, 12) == pytest.approx(0.75 * warm.optim.lr)  # the last of its warm-up
    for fork in plan_forks(directory, known, ["own"]):
        make_fork(fork)
    directory.write_config(directory.config().replace(steps=16))  # as `sluice resume RUN steps=16` does
    planned = plan_forks(directory, known, names)
    assert [fork.directory.run_id for fork in planned] == ["demo-t-fast", "demo-t-warm"]
    assert [fork.config.optim.lr for fork in planned] == [fast.optim.lr, warm.optim.lr]  # as if it had not got longer
    other = known.with_method(known.methods["own"].replace(overrides=("optim.lr=2e-6",)))
    with pytest.raises(RunError, match="run demo-t-own exists, and is no fork of demo@2 with the settings of"):
        plan_forks(directory, other, ["own"])
    shutil.rmtree("runs/demo-t-own")
    before = known.replace(num_steps=None)  # as earlier versions of Sluice began it
    assert [fork.config.optim.schedule for fork in plan_forks(directory, before, names)] == [schedule] * 3


def test_a_run_whose_rate_has_decayed_to_0_has_no_tournament_there(sluice: Command) -> None:
    directory = RunDirectory("runs/demo")
    directory.write_config(override_config(directory.config(), ["optim.schedule=linear"], ""))
    refused = "method own has optim.schedule = 'linear', whose learning rate is 0 after step 4 of 4"
    assert_rejected(sluice("tournament", "demo", "cispo"), refused, "--at")


def test_the_newest_steps_are_those_in_a_row(sluice: Command) -> None:
    history = History(RunDirectory("runs/demo"))
    assert [history.newest_steps(limit) for limit in (1, 2, 9)] == [(3, 4), (2, 4), (2, 4)]
    columns_of(history.directory).clear(3)
    assert history.newest_steps(9) == (2, 3)
    columns_of(history.directory).clear(2)
    with pytest.raises(RunError, match=r'keeps no step that can be replayed; .*store.keep_steps = "all"'):
        history.newest_steps(9)


def test_a_tournament_goes_on_as_it_was_begun(sluice: Command) -> None:
    directory, methods = RunDirectory("runs/demo"), parse_methods(["slow:optim.lr=1e-7"])
    begun = open_tournament(directory, "t", methods, (2, 3), 2, 5)
    figures = (StepFigures(step=2, failure="NonFiniteError: no"),)
    begun.with_method(begun.methods["slow"].replace(figures=figures)).save(directory)
    again = open_tournament(directory, "t", parse_methods(["fast:optim.lr=1"]))
    assert (again.first, again.stop, again.at, again.fork_steps) == (2, 3, 2, 5)
    assert set(again.methods) == {"own", "slow", "fast"}
    assert again.methods["slow"].figures == figures
    tournament = ("tournament", "demo", "slow:optim.lr=1e-8", "--at", "4", "--steps", "3")
    assert_rejected(sluice(*tournament), "begun with another --steps, --at, method slow;", "--name")
    Path("runs/demo/tournament-t.json").write_text("{}")
    assert_rejected(sluice("tournament", "demo", "cispo"), "tournament-t.json is damaged", "--name")


def test_a_run_that_is_no_fork_of_the_tournament_is_left_alone(sluice: Command) -> None:
    directory, methods = RunDirectory("runs/demo"), parse_methods(["slow:optim.lr=1e-7"])
    known = open_tournament(directory, "t", methods, at=2)
    other = RunDirectory("runs/demo-t-slow")
    for config, step in ((directory.config(), 2), (override_config(directory.config(), ["optim.lr=1e-7"], ""), 3)):
        save_fork(other, Fork(parent=directory.url, run_id="demo", step=step, changes={}))
        other.write_config(config)
        with pytest.raises(RunError, match="run demo-t-slow exists, and is no fork of demo@2 with the settings"):
            plan_forks(directory, known, ["slow"])
    save_fork(other, Fork(parent=directory.url, run_id="demo", step=2, changes={}))
    assert plan_forks(directory, known, ["slow"]) == []


def test_a_fork_that_was_changed_meanwhile_is_not_ranked(sluice: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, methods = RunDirectory("runs/demo"), parse_methods(["slow:optim.lr=1e-7"])
    known = open_tournament(directory, "t", methods, at=2)
    for fork in plan_forks(directory, known, ["own", "slow"]):
        make_fork(fork)
    monkeypatch.setattr(tournament, "CHILD", "pass")  # ends well, and the steps are gone
    monkeypatch.setattr(tournament, "hold_pool", lambda *_, **__: nullcontext())
    monkeypatch.setattr(tournament, "train_fork", SimpleNamespace(named=lambda _, task=train_fork: task.fn))
    with pytest.raises(RunError, match="run demo-t-own, a fork of the tournament, has 2 of 12 steps"):
        asyncio.run(tournament._halve(directory, known, ["own", "slow"]))


def test_one_process_holds_a_tournament(sluice: Command) -> None:
    with file_lock(Path("runs/demo/tournament-t.lock"), "it", "wait"):
        refused = f"tournament t of run demo is being driven by process {os.getpid()} on "
        assert_rejected(sluice("tournament", "demo", "cispo"), refused, "--name begins another")
        assert not Path("runs/demo/tournament-t.json").exists()


def test_half_of_the_forks_go_on_by_accuracy_then_reward() -> None:
    standings = [
        standing("failed", failure="NonFiniteError: loss"),
        standing("worst", 0.25, 0.9),
        standing("first", 0.5, 0.5),
        standing("second", 0.5, 0.5),  # equal ones stay in the order of the command
        standing("best", 0.5, 0.75),
    ]
    found = rank(standings, 12)
    assert [each.method for each in found.standings] == ["best", "first", "second", "worst", "failed"]
    assert (found.stop, found.num_kept) == (12, 3)
    without = rank([standing("a", None, 0.1), standing("b", None, None), standing("c", None, 0.2)], 3)
    assert ([each.method for each in without.standings], without.num_kept) == (["c", "a", "b"], 2)


def test_a_fork_that_failed_never_goes_on() -> None:
    failed = [standing(name, failure="NonFiniteError: loss") for name in ("a", "b")]
    assert rank([*failed, standing("c", 0.0)], 3).num_kept == 1
    with pytest.raises(RunError, match=r"no fork reached step 3, e\.g\. demo-t-a: NonFiniteError"):
        rank(failed, 3)


def test_forks_end_in_the_order_in_which_they_were_dropped() -> None:
    first = rank([standing(name, accuracy) for name, accuracy in (("a", 0.4), ("b", 0.3), ("c", 0.2), ("d", 0.1))], 2)
    last = rank([standing("a", 0.5), standing("b", 0.6)], 6)
    assert [each.method for each in final_order([first, last])] == ["b", "a", "c", "d"]
    assert [each.accuracy for each in final_order([first, last])] == [0.6, 0.5, 0.2, 0.1]


def test_known_figures_are_shown_without_any_worker(sluice: Command) -> None:
    directory = RunDirectory("runs/demo")
    known = open_tournament(directory, "t", parse_methods(["cispo", "wild:optim.lr=9"]))
    update = UpdateChange(cosine=0.5, norm_ratio=2.0, norm_a=1.0, norm_b=2.0)
    shifts = (LogprobShift(row=4, token=1, text="<b>", a=0.5, b=-0.25),)
    figures = [StepFigures(step=step, update=update, ess=0.25 * step, shifts=shifts) for step in (2, 3)]
    failed = StepFigures(step=2, failure="NonFiniteError: a loss")
    for name, found in (("own", figures), ("cispo", figures), ("wild", [failed])):
        known = known.with_method(known.methods[name].replace(figures=tuple(found)))
    known.save(directory)
    command = ("tournament", "demo", "cispo", "wild:optim.lr=9", "--no-forks")
    code, out, _ = sluice(*command)
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert code == 0, out
    assert rows["cispo"] == ["0.5", "2", "2", "0.625", "-", "-", "-", "'<b>'", "-0.2500"]
    assert rows["wild"] == [*["-"] * 7, "NonFiniteError:", "a", "loss"]
    page = Path("runs/demo/tournament-t.html").read_text()
    assert "3 methods compared on steps 2 to 3; no forks yet" in page
    assert "&#39;&lt;b&gt;&#39;" in page
    assert "no alarms" not in page
    printed = json.loads(sluice(*command, "--json").out)
    assert [each["name"] for each in printed["methods"]] == ["own", "cispo", "wild"]
    assert (printed["steps"], printed["at"], printed["rounds"]) == ([2, 4], 4, [])


def test_a_record_is_plain_json(sluice: Command) -> None:
    directory = RunDirectory("runs/demo")
    begun = open_tournament(directory, "t", parse_methods(["cispo"]))
    begun.save(directory)
    stored = json.loads(Path("runs/demo/tournament-t.json").read_text())
    assert Tournament.model_validate(stored) == begun
