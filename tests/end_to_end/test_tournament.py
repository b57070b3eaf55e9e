"""`sluice tournament`: figures are those of replays, it goes on after a kill and Ctrl-C, a bad method ends last."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from flows.tournament import Tournament
from infra.storage.driver_lock import is_driven
from infra.storage.lineage import load_fork
from tests.support.progress import wait_until
from tests.support.run_results import Run
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

PARENT = "compared"
STUCK, TRUNCATED = "stuck", "truncated"  # the first learns nothing; the second has no row left to train on
METHODS = ("gspo", f"{STUCK}:optim.lr=1e-12", f"{TRUNCATED}:overlong.mask_truncated=true")
COMMAND = ("tournament", PARENT, *METHODS, "--steps", "1:3", "--at", "0", "--fork-steps", "3")
KEPT = ("steps=3", "store.keep_steps=all", "checkpoint.every_steps=3", "optim.updates_per_step=2")
# A quarter is right at first, and a third after three steps.
LETTERS = """
def share(prompt, completion, answer, info):
    return sum(each.isascii() and each.isalnum() for each in completion) / 12
"""


def fork_of(workplace: Workplace, method: str) -> Run:
    return workplace.run(f"{PARENT}-t-{method}")


def starts_of(run: Run) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in run.metrics.events()]


def trained(workplace: Workplace) -> list[str]:
    """The methods whose forks have ended their first round; which is trained first is the pool's decision."""
    forks = {name: fork_of(workplace, name) for name in ("own", "gspo", STUCK)}
    return [name for name, fork in forks.items() if fork.exists and fork.summary() is not None]


@pytest.fixture(scope="module")
def before(workplace: Workplace) -> dict[str, list[dict[str, float]]]:
    """The metrics of the forks that were trained when the tournament and its server were killed, in another fork."""
    (workplace.folder / "letters.py").write_text(LETTERS)
    workplace.sluice("train", "tiny.toml", "--run-id", PARENT, *KEPT, "reward.path=letters:share")
    command = workplace.start(*COMMAND)
    forks = [fork_of(workplace, name) for name in ("own", "gspo", STUCK)]
    command.wait_for(lambda: bool(done := trained(workplace)) and sum(fork.num_done > 0 for fork in forks) > len(done))
    command.kill()
    workplace.kill_service("prefect")  # with which the slot that the fork holds would be lost, were it in its memory
    for fork in forks:
        wait_until(lambda fork=fork: not is_driven(fork))  # its process ends with the tournament's
    return {name: fork_of(workplace, name).step_metrics() for name in trained(workplace)}


@pytest.fixture(scope="module")
def interrupted(workplace: Workplace, before: dict[str, list[dict[str, float]]]) -> str:
    """What the same command printed then, until Ctrl-C."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
    command = workplace.start(*COMMAND)
    signal.signal(signal.SIGINT, handler)
    forks = [fork_of(workplace, name) for name in ("own", "gspo", STUCK)]
    num_done = sum(fork.num_done for fork in forks)
    command.wait_for(lambda: sum(fork.num_done for fork in forks) > num_done)
    command.interrupt()
    printed = command.finish(exit_code=130)
    assert not any(is_driven(fork) for fork in forks)
    return printed


@pytest.fixture(scope="module")
def found(workplace: Workplace, interrupted: str) -> Iterator[dict[str, Any]]:
    """What it prints at its end, with two slots for its forks."""
    workplace.prefect("gcl", "update", "sluice-default", "--limit", "2").finish()
    printed = workplace.sluice(*COMMAND, "--json")
    yield json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert not list((workplace.folder / "runs").rglob(".replay"))


def test_a_fork_ends_with_a_killed_tournament(workplace: Workplace, before: dict[str, list[dict[str, float]]]) -> None:
    assert [len(steps) for steps in before.values()] == [3]
    (going,) = (name for name in ("own", "gspo", STUCK) if name not in before and fork_of(workplace, name).num_done)
    assert starts_of(fork_of(workplace, going)) == [("fork", 0), ("resume", 0)]


def test_after_ctrl_c_the_same_command_goes_on(interrupted: str, found: dict[str, Any]) -> None:
    assert interrupted.splitlines()[-1] == "the same command goes on with the tournament"
    assert len(found["rounds"]) == 2


def test_forks_are_trained_at_the_same_time_if_the_pool_has_slots(workplace: Workplace, found: dict[str, Any]) -> None:
    spans = []
    for name in ("own", "gspo"):
        steps = [report for report in fork_of(workplace, name).metrics.steps() if report.step >= 3]
        times = [report.started_at for report in steps if report.started_at is not None]
        spans.append((times[0], times[-1] + steps[-1].seconds))
    assert max(start for start, _ in spans) < min(end for _, end in spans)


def test_figures_are_of_each_step_from_the_runs_own_weights(workplace: Workplace, found: dict[str, Any]) -> None:
    own, gspo, stuck, truncated = found["methods"]
    assert [each["step"] for each in own["figures"]] == [1, 2]
    for step, other, none in zip(own["figures"], gspo["figures"], stuck["figures"], strict=True):
        assert (step["update"]["cosine"], step["update"]["norm_ratio"]) == (pytest.approx(1), 1)
        assert 0 < other["update"]["cosine"] < 1
        assert other["update"]["norm_a"] == step["update"]["norm_b"]
        assert none["update"]["norm_b"] < 1e-6 * step["update"]["norm_b"]
        assert 0 < step["ess"] < none["ess"] <= 1
        assert [shift["a"] for shift in step["shifts"]] == [shift["b"] for shift in step["shifts"]]
        assert len(other["shifts"]) == 5
    metrics = workplace.run(PARENT).step_metrics()
    assert [each["metrics"]["loss"] for each in own["figures"]] == [metrics[step]["loss"] for step in (1, 2)]
    assert all("PlanError" in each["failure"] for each in truncated["figures"])


def test_a_first_step_is_that_of_a_replay(workplace: Workplace, found: dict[str, Any]) -> None:
    slow = "optim.lr=1e-12"
    printed = workplace.sluice("replay", PARENT, "--steps", "2", slow, "--json")
    (replayed,) = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))["steps"]
    stuck = found["methods"][2]
    assert (stuck["name"], stuck["overrides"]) == (STUCK, [slow])
    assert stuck["figures"][1]["update"] == replayed["update"]
    assert stuck["figures"][1]["shifts"] == replayed["shifts"]


def test_what_was_trained_before_a_kill_is_not_trained_again(
    workplace: Workplace, before: dict[str, list[dict[str, float]]], found: dict[str, Any]
) -> None:
    for name, steps in before.items():
        fork = fork_of(workplace, name)
        assert fork.step_metrics()[:3] == steps
        assert starts_of(fork) in ([("fork", 0), ("resume", 0)], [("fork", 0), ("resume", 0), ("resume", 3)])


def test_bad_methods_end_last_and_half_of_the_forks_go_on(workplace: Workplace, found: dict[str, Any]) -> None:
    first, last = found["rounds"]
    assert [first["stop"], last["stop"]] == [3, 9]
    assert [each["method"] for each in first["standings"]][2:] == [STUCK, TRUNCATED]
    assert {each["method"] for each in last["standings"]} == {"own", "gspo"}
    assert "PlanError" in first["standings"][-1]["failure"]
    steps = {name: fork_of(workplace, name).num_done for name in ("own", "gspo", STUCK, TRUNCATED)}
    assert steps == {"own": 9, "gspo": 9, STUCK: 3, TRUNCATED: 0}
    for round_ in (first, last):
        for each in [each for each in round_["standings"] if not each["failure"]]:
            evals = fork_of(workplace, each["method"]).metrics.evals()
            assert each["accuracy"] == next(of.accuracy for of in evals if of.policy_version == round_["stop"])
    own = load_fork(fork_of(workplace, "own"))
    assert own is not None
    assert own.changes == {}


def test_a_finished_tournament_only_prints(workplace: Workplace, found: dict[str, Any]) -> None:
    record = workplace.run(PARENT).path / "tournament-t.json"
    before, names = record.read_bytes(), ("own", "gspo", STUCK, TRUNCATED)
    starts = {name: starts_of(fork_of(workplace, name)) for name in names}
    printed = workplace.sluice(*COMMAND)
    assert "training run" not in printed
    assert "ranked by held-out accuracy, then mean reward of a fork's last steps" in printed
    assert {name: starts_of(fork_of(workplace, name)) for name in names} == starts
    assert Tournament.model_validate_json(record.read_bytes()) == Tournament.model_validate_json(before)
    page = (workplace.run(PARENT).path / "tournament-t.html").read_text()
    best = found["rounds"][-1]["standings"][0]["method"]
    assert f"{best} is best of 4" in page
    for shown in ("On the same steps", "Tokens", "Forks", "Settings", "PlanError"):
        assert shown in page
