"""Kill any process at any moment: the resumed run ends in the same weights, bit for bit."""

import signal

import pytest

from tests.services import Command, Run, Workplace

pytestmark = pytest.mark.slow

STEPS = 6
CONFIG = ("train", "tiny.toml", f"steps={STEPS}")
STAGES = ("rollout", "put", "logprob", "advantage", "update")  # one is killed at in each step

ROLES = ("PolicyWorker", "RolloutWorker", "ReferenceWorker", "RayStoreRegistry")


@pytest.fixture(scope="module")
def expected(workplace: Workplace) -> Run:
    """An undisturbed run."""
    workplace.sluice(*CONFIG, "--run-id", "undisturbed")
    return workplace.run("undisturbed")


def assert_same(run: Run, expected: Run) -> None:
    assert run.weights(STEPS) == expected.weights(STEPS)
    assert run.step_metrics() == expected.step_metrics()
    assert run.store_bytes_at_end() == 0


class KilledAgainAndAgain:
    """One run whose driver is killed in each of its first steps, at another stage each time."""

    def __init__(self, workplace: Workplace) -> None:
        self.workplace, self.run = workplace, workplace.run("killed-drivers")
        self.driver: Command = workplace.start(*CONFIG, "--run-id", "killed-drivers")
        self._left_step, self._left_entries = -1, dict[str, int]()

    def kill_at(self, step: int, stage: str) -> None:
        """Kill the driver once it has passed a stage, and resume the run."""
        self.driver.wait_for(lambda: self._passed(step, stage))
        self.driver.kill()
        self._left_step, self._left_entries = step, self.run.entries(step)
        self.driver = self.workplace.start("resume", "killed-drivers")

    def _passed(self, step: int, stage: str) -> bool:
        """Check that no stage that the last driver committed is run again, as long as its step is not done."""
        now = self.run.entries(self._left_step)
        if len(self.run.metrics.steps()) <= self._left_step:
            for name, written in now.items():
                assert self._left_entries.get(name, written) == written, name
        return self.run.passed(step, stage)


@pytest.fixture(scope="module")
def killed(workplace: Workplace, expected: Run) -> KilledAgainAndAgain:
    return KilledAgainAndAgain(workplace)


@pytest.mark.parametrize(("step", "stage"), list(enumerate(STAGES)), ids=STAGES)
def test_a_driver_killed_again_and_again(killed: KilledAgainAndAgain, step: int, stage: str) -> None:
    killed.kill_at(step, stage)


def test_a_run_whose_drivers_were_killed_ends_the_same(killed: KilledAgainAndAgain, expected: Run) -> None:
    killed.driver.finish()
    assert_same(killed.run, expected)
    assert killed.run.ledger.steps() == []


@pytest.fixture
def lost_ray(workplace: Workplace, expected: Run) -> Run:
    """A run in the middle of a step, with rare checkpoints, whose driver and Ray are gone."""
    run = workplace.run("lost-ray")
    driver = workplace.start(*CONFIG, "checkpoint.every_steps=2", "--run-id", run.run_id)
    driver.wait_for(lambda: run.committed(3, "put"))
    driver.kill()
    workplace.stop_ray()
    return run


def test_a_lost_ray_and_rare_checkpoints(workplace: Workplace, expected: Run, lost_ray: Run) -> None:
    run = lost_ray
    generated = run.generate_seconds()
    damaged = next((run.columns / "step-000003").glob("*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    printed = workplace.sluice("resume", run.run_id)
    assert f"3 of {STEPS} steps are done" in printed
    assert f"step   3/{STEPS}" in printed  # from the checkpoint of version 2, so that one is run again
    assert f"step   2/{STEPS}" not in printed
    assert "step 3 is run again from its start: chunk lost-ray/3/rollout/0/0: the checksum" in printed
    # Its columns survived Ray, so that step 2 was not generated again: the ledger still told when it was.
    assert run.generate_seconds()[2] == generated[2]
    assert_same(run, expected)


@pytest.fixture(scope="module")
def living_driver(workplace: Workplace, expected: Run) -> Command:
    """The driver of a run whose workers are killed, one in each step."""
    return workplace.start(*CONFIG, "--run-id", "killed-workers", "runtime.max_restarts=9")


@pytest.mark.parametrize(("step", "role"), list(enumerate(ROLES, start=1)), ids=ROLES)
def test_a_worker_killed_under_a_living_driver(
    workplace: Workplace, living_driver: Command, step: int, role: str
) -> None:
    run = workplace.run("killed-workers")
    living_driver.wait_for(lambda: run.passed(step, "rollout"))
    assert workplace.kill_worker(role) == 1


def test_a_run_whose_workers_were_killed_ends_the_same(
    workplace: Workplace, living_driver: Command, expected: Run
) -> None:
    living_driver.finish()
    assert_same(workplace.run("killed-workers"), expected)


def test_a_terminated_driver_leaves_nothing_behind(workplace: Workplace, expected: Run) -> None:
    run = workplace.run("terminated")
    driver = workplace.start(*CONFIG, "--run-id", run.run_id)
    driver.wait_for(lambda: run.passed(1, "put"))
    driver.terminate()
    driver.finish(128 + signal.SIGTERM)
    assert f"resume with: sluice resume {run.run_id}" in driver.errors
    assert "Traceback" not in driver.errors
    assert not [name for name in workplace.worker_names() if not name.startswith(("IDLE", "Dashboard", "RuntimeEnv"))]
    workplace.sluice("resume", run.run_id)
    assert_same(run, expected)
