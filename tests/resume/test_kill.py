"""Kill any process at any moment: the resumed run ends in the same weights, bit for bit."""

import signal
from collections.abc import Callable

import pytest

from tests.services import Workplace

pytestmark = pytest.mark.slow

STEPS = 6
CONFIG = ("train", "tiny.toml", f"steps={STEPS}")


@pytest.fixture(scope="module")
def expected(workplace: Workplace) -> str:
    """The final weights of a run that nothing happened to."""
    workplace.sluice(*CONFIG, "--run-id", "undisturbed")
    return workplace.weights("undisturbed", STEPS)


def test_a_driver_killed_again_and_again(workplace: Workplace, expected: str) -> None:
    run_id = "killed-drivers"
    driver, left = workplace.start(*CONFIG, "--run-id", run_id), None
    for step, stage in enumerate(("rollout", "put", "logprob", "advantage", "update")):
        workplace.wait_for(reached(workplace.committed(run_id, step, stage), left), driver)
        workplace.kill(driver)
        left = LeftLedger(workplace, run_id, step)
        driver = workplace.start("resume", run_id)
    out, err = driver.communicate(timeout=120)
    assert driver.returncode == 0, out + err
    assert workplace.weights(run_id, STEPS) == expected
    assert workplace.metrics(run_id) == workplace.metrics("undisturbed")
    assert workplace.store_bytes_at_end(run_id) == 0
    assert not list((workplace.folder / "runs" / run_id / "ledger").glob("step-*"))


def reached(committed: Callable[[], bool], left: "LeftLedger | None") -> Callable[[], bool]:
    """Whether the stage to kill at is committed; what the last driver left is looked at all the while."""

    def look() -> bool:
        if left is not None:
            left.check()
        return committed()

    return look


class LeftLedger:
    """What a killed driver had committed of a step: no stage of it is run again."""

    def __init__(self, workplace: Workplace, run_id: str, step: int) -> None:
        self._workplace, self._run_id, self._step = workplace, run_id, step
        self._entries = workplace.ledger(run_id, step)

    def check(self) -> None:
        """An entry stays as it was written until its step is done."""
        now = self._workplace.ledger(self._run_id, self._step)
        if self._workplace.steps_done(self._run_id) <= self._step:
            for name, written in now.items():
                assert self._entries.get(name, written) == written, name


def test_a_lost_ray_and_checkpoints_that_are_rare(workplace: Workplace, expected: str) -> None:
    run_id = "lost-ray"
    rare = "checkpoint.every_steps=2"
    workplace.kill_when(workplace.committed(run_id, 3, "put"), *CONFIG, rare, "--run-id", run_id)
    workplace.stop_ray()
    sampled = workplace.sampling_seconds(run_id)
    damaged = next((workplace.folder / "runs" / run_id / "columns" / "step-000003").glob("*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    printed = workplace.sluice("resume", run_id)
    assert f"3 of {STEPS} steps are done" in printed
    assert f"step   3/{STEPS}" in printed  # from the checkpoint of version 2, so that one is run again
    assert f"step   2/{STEPS}" not in printed
    assert "step 3 is run again from its start: chunk lost-ray/3/rollout/0/0: the checksum" in printed
    # Its columns survived Ray, so that step 2 was not sampled again: the ledger still told when it was.
    assert workplace.sampling_seconds(run_id)[2] == sampled[2]
    assert workplace.weights(run_id, STEPS) == expected
    assert workplace.metrics(run_id) == workplace.metrics("undisturbed")


def test_workers_killed_under_a_living_driver(workplace: Workplace, expected: str) -> None:
    run_id = "killed-workers"
    driver = workplace.start(*CONFIG, "--run-id", run_id, "runtime.max_restarts=9")
    for step, role in enumerate(("PolicyWorker", "RolloutWorker", "ReferenceWorker", "RayStoreRegistry"), start=1):
        workplace.wait_for(workplace.committed(run_id, step, "rollout"), driver)
        assert workplace.kill_worker(role) == 1
    out, err = driver.communicate(timeout=120)
    assert driver.returncode == 0, out + err
    assert workplace.weights(run_id, STEPS) == expected
    assert workplace.metrics(run_id) == workplace.metrics("undisturbed")


def test_a_terminated_driver_leaves_nothing_behind(workplace: Workplace, expected: str) -> None:
    run_id = "terminated"
    driver = workplace.start(*CONFIG, "--run-id", run_id)
    workplace.wait_for(workplace.committed(run_id, 1, "put"), driver)
    driver.terminate()
    out, err = driver.communicate(timeout=60)
    assert driver.returncode == 128 + signal.SIGTERM, out + err
    assert f"resume with: sluice resume {run_id}" in err
    assert "Traceback" not in err
    assert not [name for name in workplace.worker_names() if not name.startswith(("IDLE", "Dashboard", "RuntimeEnv"))]
    workplace.sluice("resume", run_id)
    assert workplace.weights(run_id, STEPS) == expected
