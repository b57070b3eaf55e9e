"""Kill any process at any moment: the resumed run ends in the same weights, bit for bit.

Two runs that are killed, and an undisturbed one of the same config.
"""

import re
import signal
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import chain

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

from infra.services.local import ServiceState
from tests.support.progress import wait_until
from tests.support.run_results import Run
from tests.support.tiny import make_tiny_moe
from tests.support.workplace import Command, Workplace

STEPS = 6
CONFIG = (  # all columns of rows: the policy trains with the experts that the engine chose
    *("train", "tiny.toml", f"steps={STEPS}", "loss.behavior=recompute"),
    *("model.path=experts", "rollout.router_replay=true"),
)
# Of the first run, workers and then the driver are killed, and at last the local Prefect server.
KILLED = "killed"
ROLES = ("PolicyWorker", "RolloutWorker", "StoreIndex")  # one is killed in each step after the first
LAST = STEPS - 1
# Of the second, the driver is terminated in one step, and in a later one killed with Ray.
STOPPED = "stopped"
TERMINATED, LOST = 1, 5
COMPLETE = "complete"  # of another, the driver is killed when nothing is left to do but the report
EXTENDED = "extended"  # of one that was complete and has got another step, the driver is killed after its line
NOTICED = "noticed"  # of a third, its end is announced, and it has no other checkpoint
SAVED, DAMAGED = 3, 4  # of the steps before that: the first after the last checkpoint; and one with a damaged column
LIMITS = (  # none of which changes a bit of the result
    *("store.capacity_bytes=5000000", "reward.timeout_seconds=20"),
    *("reward.num_processes=1", "rollout.num_workers=2", "model.gradient_checkpointing=true"),
)


@pytest.fixture(scope="module")
def expected(workplace: Workplace) -> Run:
    """An undisturbed run."""
    make_tiny_moe(workplace.folder / "experts")
    workplace.sluice(*CONFIG, "--run-id", "undisturbed")
    return workplace.run("undisturbed")


class KilledRun:
    """One run whose processes are killed one after another, as the fixtures below tell in this order.

    Attributes:
        run: The run.
        driver: The driver that runs now.
    """

    def __init__(self, workplace: Workplace, run_id: str) -> None:
        self.run, self._workplace = workplace.run(run_id), workplace
        self.driver = workplace.start(*CONFIG, "--run-id", run_id, "runtime.max_restarts=1")
        self._left_step, self._left_entries = -1, dict[str, float]()

    def wait_for(self, reached: Callable[[], bool], *, standing: bool = False) -> None:
        """Wait until `reached` returns true, while the driver runs; have it stand there if asked to."""

        def reached_with_entries_kept() -> bool:
            self._check_entries()
            return reached()

        wait = self.driver.wait_standing if standing else self.driver.wait_for
        wait(reached_with_entries_kept)

    def stand_after(self, step: int, stage: str) -> None:
        """Have the driver stand once it has passed a stage."""
        self.wait_for(lambda: self.run.passed(step, stage), standing=True)

    def stand_in_step(self, least: int) -> None:
        """Have the driver stand in this or a later step, after the checkpoint before it: none is done twice."""

        def stands() -> bool:
            step = self.run.num_done
            is_saved = (self.run.path / f"policy/step-{step:06d}/manifest.json").exists()
            return step >= least and is_saved and self.run.committed(step, "rollout")

        self.wait_for(stands, standing=True)

    def kill_driver(self, step: int, stage: str) -> str:
        """Kill the driver once it has passed a stage; return what it had printed."""
        self.stand_after(step, stage)
        printed = self.driver.kill()
        self._keep_entries(step)
        return printed

    def kill_worker(self, role: str) -> None:
        """Kill the worker of a role, under the driver, which stands in a step."""
        self._keep_entries(self.run.num_done)
        assert self._workplace.kill_worker(role) == 1
        self.driver.resume()

    def _keep_entries(self, step: int) -> None:
        self._left_step, self._left_entries = step, self.run.entries(step)

    def resume(self, *overrides: str) -> Command:
        """Have another driver go on."""
        self.driver = self._workplace.start("resume", self.run.run_id, *overrides)
        return self.driver

    def _check_entries(self) -> None:
        """Check that no stage that was committed at a kill is run again, as long as its step is not done."""
        if not self._left_entries:
            return
        now = self.run.entries(self._left_step)
        if self.run.num_done <= self._left_step:
            for name, written in now.items():
                assert self._left_entries.get(name, written) == written, name


@pytest.fixture(scope="module")
def killed(workplace: Workplace, expected: Run) -> KilledRun:
    return KilledRun(workplace, KILLED)


@pytest.fixture(scope="module")
def living(killed: KilledRun) -> str:
    """What the first driver printed; workers are killed under it, and then it is, after an update."""
    for step, role in enumerate(ROLES, start=1):
        killed.stand_in_step(step)
        killed.kill_worker(role)
    return killed.kill_driver(len(ROLES) + 1, "update")


@pytest.fixture(scope="module")
def before(workplace: Workplace, killed: KilledRun, living: str) -> ServiceState:
    """The local Prefect server that the second driver had until it was killed, with a step or two to go."""
    driver = killed.resume()
    killed.wait_for(lambda: "2 workers:" in driver.printed, standing=True)
    state = workplace.services.state("prefect")
    assert state is not None
    workplace.kill_service("prefect")
    driver.resume()
    return state


@pytest.fixture(scope="module")
def finished(killed: KilledRun, before: ServiceState) -> str:
    """What the second driver printed."""
    killed.wait_for(lambda: killed.run.passed(LAST, "update"))
    return killed.driver.finish()


@pytest.fixture(scope="module")
def stopped(workplace: Workplace, expected: Run) -> KilledRun:
    return KilledRun(workplace, STOPPED)


@pytest.fixture(scope="module")
def terminated(stopped: KilledRun) -> Command:
    """The first driver of the second run, which got a SIGTERM."""
    driver = stopped.driver
    stopped.stand_after(TERMINATED, "put")
    driver.terminate()
    driver.resume()
    driver.finish(128 + signal.SIGTERM)
    return driver


@pytest.fixture(scope="module")
def lost_ray(workplace: Workplace, stopped: KilledRun, terminated: Command) -> str:
    """What the next driver printed, which had rare checkpoints, and was killed together with Ray."""
    stopped.resume("checkpoint.every_steps=3")
    printed = stopped.kill_driver(LOST, "logprob")
    workplace.stop_ray()
    damaged = next((stopped.run.path / "columns" / f"step-{DAMAGED:06d}").glob("rollout-*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    return printed


@pytest.fixture(scope="module")
def generated(stopped: KilledRun, lost_ray: str) -> list[float]:
    """How long each step's rollout took before Ray was lost."""
    return stopped.run.generate_seconds()


@pytest.fixture(scope="module")
def resumed(stopped: KilledRun, generated: list[float]) -> str:
    """What the last driver of the second run printed."""
    return stopped.resume(*LIMITS).finish()


async def flow_run_states(names: list[str], client: PrefectClient) -> dict[str, list[str]]:
    """Return the states of the flow runs of these names that the server knows to have started, by name."""
    found = await client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=names)))
    states = defaultdict[str, list[str]](list)
    for flow_run in found:
        states[flow_run.name].append(str(flow_run.state_type.value))
    return states


def check_results(run: Run, expected: Run) -> None:
    assert run.weights(STEPS) == expected.weights(STEPS) != expected.weights(STEPS - 1)
    assert run.step_metrics() == expected.step_metrics()
    assert expected.step_metrics()[0]["grad_norm"] > 0
    assert run.store_bytes_at_end() == 0
    assert run.ledger.steps() == []


def test_workers_killed_under_a_living_driver(workplace: Workplace, living: str) -> None:
    for step in range(1, len(ROLES) + 2):  # no step is done twice
        assert living.count(f"step {step:3}/{STEPS}") == 1
    names = [f"{KILLED}/step-{step:04d}" for step in range(len(ROLES) + 1)]
    states = workplace.ask(partial(flow_run_states, names))
    assert set(states) == set(names)
    assert [states[name].count("COMPLETED") for name in names] == [1] * len(names)
    assert set(chain(*states.values())) <= {"COMPLETED", "FAILED"}  # a step whose worker was killed was run again


def test_a_local_prefect_server_that_was_killed_is_started_again(
    workplace: Workplace, before: ServiceState, finished: str
) -> None:
    assert "the local Prefect server had died, and was started again" in finished
    assert finished.count(f"step {STEPS:3}/{STEPS}") == 1
    after = workplace.services.state("prefect")
    assert after is not None
    assert (after.port, after.pid == before.pid) == (before.port, False)
    last = f"{KILLED}/step-{LAST:04d}"
    states = workplace.ask(partial(flow_run_states, [KILLED, last]))
    assert [states[name].count("COMPLETED") for name in (KILLED, last)] == [1, 1]


@pytest.mark.command("train", "resume")
def test_the_killed_run_ends_the_same(killed: KilledRun, expected: Run, finished: str) -> None:
    check_results(killed.run, expected)
    events = killed.run.metrics.events()
    restarts = [event for event in events if event.kind == "restart"]
    assert [event.kind for event in events] == ["start", *["restart"] * len(restarts), "resume"]
    assert restarts
    assert all(event.reason for event in restarts)


@pytest.mark.extended
def test_a_driver_killed_once_its_run_is_complete_leaves_no_worker(workplace: Workplace) -> None:
    driver, run = workplace.start("train", "tiny.toml", "steps=1", "--run-id", COMPLETE), workplace.run(COMPLETE)
    driver.wait_standing(lambda: run.summary() is not None)
    driver.kill()
    assert "nothing to resume" in workplace.sluice("resume", COMPLETE)
    wait_until(lambda: not workplace.worker_names())


@pytest.mark.extended
def test_a_run_that_was_extended_and_killed_after_its_last_line_is_completed(workplace: Workplace) -> None:
    run, steps = workplace.run(EXTENDED), 1
    workplace.sluice("train", "tiny.toml", f"steps={steps}", "checkpoint.every_steps=100", "--run-id", EXTENDED)
    driver = workplace.start("resume", EXTENDED, f"steps={steps + 1}")
    driver.wait_standing(lambda: run.num_done > steps)
    driver.kill()
    workplace.sluice("resume", EXTENDED)
    summary = run.summary()
    assert summary is not None
    assert summary.steps == steps + 1
    assert run.weights(steps + 1) != run.weights(steps)


@pytest.mark.extended
def test_a_terminated_driver_leaves_nothing_behind(workplace: Workplace, terminated: Command) -> None:
    assert f"resume with: sluice resume {STOPPED}" in terminated.errors
    assert "Traceback" not in terminated.errors
    wait_until(lambda: not workplace.worker_names())


@pytest.mark.extended
def test_a_terminated_step_is_run_again(lost_ray: str) -> None:
    finished = f"{TERMINATED + 1} of {STEPS} steps are done" in lost_ray  # if its scoring had begun
    assert finished or f"{TERMINATED} of {STEPS} steps are done" in lost_ray
    assert lost_ray.count(f"step {TERMINATED + 1:3}/{STEPS}") == (not finished)


@pytest.mark.extended
def test_a_terminated_driver_finishes_its_step_and_saves_it(workplace: Workplace, expected: Run) -> None:
    driver, run = workplace.start(*CONFIG, "checkpoint.every_steps=100", "--run-id", NOTICED), workplace.run(NOTICED)
    driver.wait_standing(lambda: run.passed(1, "logprob"))
    driver.terminate()
    driver.resume()
    printed = driver.finish(128 + signal.SIGTERM)
    (step,) = re.findall(r"SIGTERM, [\d.]+ s ago: the checkpoint after step (\d+) is complete; the run can", printed)
    assert int(step) == run.num_done >= 2
    assert f"{step} of {STEPS} steps are done" in workplace.sluice("resume", NOTICED)
    assert run.weights(STEPS) == expected.weights(STEPS)


@pytest.mark.extended
def test_a_lost_ray_rare_checkpoints_and_a_damaged_column(
    stopped: KilledRun, generated: list[float], resumed: str
) -> None:
    assert f"{LOST} of {STEPS} steps are done" in resumed
    for step in range(STEPS):  # printed from one; those since the checkpoint are run again
        assert resumed.count(f"step {step + 1:3}/{STEPS}") == (step >= SAVED)
    assert resumed.count("is run again from its start") == 1
    chunk = f"{STOPPED}/{DAMAGED}/rollout/0/0"
    assert f"step {DAMAGED} is run again from its start: chunk {chunk}: the checksum" in resumed
    # Other columns survived Ray, so that they were not generated again: the ledger still told when they were.
    assert stopped.run.generate_seconds()[:DAMAGED] == generated[:DAMAGED]


@pytest.mark.extended
def test_the_stopped_run_ends_the_same(stopped: KilledRun, expected: Run, resumed: str) -> None:
    check_results(stopped.run, expected)
    assert [event.kind for event in stopped.run.metrics.events()] == ["start", "resume", "resume"]


@pytest.mark.extended
def test_more_workers_than_batches_get_the_same_batches(stopped: KilledRun, resumed: str) -> None:
    assert "lower it to 2 to use them all" in resumed
    assert stopped.run.config().rollout.batch_prompts == 4  # as one worker had them
