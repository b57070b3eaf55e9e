"""Kill any process at any moment: the resumed run ends in the same weights, bit for bit."""

import json
import signal
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import chain

import psutil
import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

from infra.services.local import LocalServices, ServiceState
from schemas.step import StoredBatch
from tests.run_results import Run
from tests.services import Command, Workplace

pytestmark = pytest.mark.slow

STEPS = 6
CONFIG = ("train", "tiny.toml", f"steps={STEPS}", "loss.behavior=recompute")  # all stages
STAGES = ("rollout", "put", "logprob", "advantage", "update")  # one is killed at in each step

LIMITS = (  # none of which changes a bit of the result
    *("store.capacity_bytes=5000000", "store.lease_seconds=1000", "reward.timeout_seconds=20"),
    *("reward.num_processes=1", "rollout.num_workers=2", "model.gradient_checkpointing=true"),
)
ROLES = ("PolicyWorker", "RolloutWorker", "ReferenceWorker", "StoreIndex")


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
    """One run whose driver is killed in each of its first steps, at another stage each time.

    Its Prefect server was configured, so no driver starts it again.

    Attributes:
        run: The run.
        driver: The driver that runs now.
        left: The text of the ledger's entries that were found after a kill, by stage.
    """

    def __init__(self, workplace: Workplace, server: LocalServices) -> None:
        self.workplace, self.server, self.run = workplace, server, workplace.run("killed-drivers")
        configured = f"runtime.prefect_api_url={server.prefect_api_url}"
        self.driver = self._start(*CONFIG, "--run-id", "killed-drivers", configured)
        self.left: dict[str, str] = {}
        self._left_step, self._left_entries = -1, dict[str, float]()

    def kill_at(self, step: int, stage: str) -> None:
        """Kill the driver once it has passed a stage, and resume the run."""
        self.driver.wait_for(lambda: self._passed(step, stage))
        self.driver.kill()
        self._left_step, self._left_entries = step, self.run.entries(step)
        found = {path.name.partition("-")[0]: path for path in self.run.step_ledger(step).glob("*")}
        self.left |= {stage: path.read_text() for stage, path in found.items() if self.run.committed(step, stage)}
        self.driver = self._start("resume", "killed-drivers")

    def _start(self, *arguments: str) -> Command:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(self.workplace.environment, "PREFECT_CLIENT_MAX_RETRIES", "1")  # it gives up soon
            return self.workplace.start(*arguments)

    def _passed(self, step: int, stage: str) -> bool:
        """Check that no stage that the last driver committed is run again, as long as its step is not done."""
        now = self.run.entries(self._left_step)
        if self.run.num_done <= self._left_step:
            for name, written in now.items():
                assert self._left_entries.get(name, written) == written, name
        return self.run.passed(step, stage)


@pytest.fixture(scope="module")
def killed(
    workplace: Workplace, expected: Run, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KilledAgainAndAgain]:
    server = LocalServices(tmp_path_factory.mktemp("server"))
    server.start(prefect=True, ray=False)
    yield KilledAgainAndAgain(workplace, server)
    server.stop()


@pytest.mark.parametrize(("step", "stage"), list(enumerate(STAGES)), ids=STAGES)
def test_a_driver_killed_again_and_again(killed: KilledAgainAndAgain, step: int, stage: str) -> None:
    killed.kill_at(step, stage)


def test_a_configured_prefect_server_that_was_killed_is_waited_for(killed: KilledAgainAndAgain) -> None:
    killed.driver.wait_for(lambda: killed.run.passed(len(STAGES), "rollout"))
    state = killed.server.state("prefect")
    assert state is not None
    psutil.Process(state.pid).kill()
    killed.driver.wait_for(lambda: "waiting at most" in killed.driver.printed)
    assert killed.server.restart_prefect()
    printed = killed.driver.finish()
    assert printed.count(f"step   {STEPS}/{STEPS}") == 1
    assert "Traceback" not in printed
    assert [event.kind for event in killed.run.metrics.events()] == ["start", *["resume"] * len(STAGES)]


def test_a_run_whose_drivers_and_server_were_killed_ends_the_same(killed: KilledAgainAndAgain, expected: Run) -> None:
    killed.driver.finish()
    assert_same(killed.run, expected)
    assert killed.run.ledger.steps() == []


def test_what_the_ledger_holds_is_small_and_plain(killed: KilledAgainAndAgain) -> None:
    assert {"rollout", "put", "logprob", "reference", "advantage"} <= set(killed.left)
    for entry in killed.left.values():
        record = json.loads(entry)  # JSON throughout: no tensor, table or object reference
        assert len(entry) < 20_000
        assert "ObjectRef" not in entry
        assert record["metadata"]["serializer"]["type"] == "sluice-handle"  # JSON, as `json.loads` has shown
    result = json.loads(killed.left["put"])["result"]
    handle = json.loads(result) if isinstance(result, str) else result
    assert StoredBatch.model_validate(handle["data"]).batch.columns[:2] == ("prompt_ids", "response_ids")


@pytest.fixture(scope="module")
def terminated(workplace: Workplace, expected: Run) -> Run:
    """A run with rare checkpoints, whose driver got a SIGTERM within its second step."""
    run = workplace.run("terminated")
    driver = workplace.start(*CONFIG, "checkpoint.every_steps=2", "--run-id", run.run_id)
    driver.wait_for(lambda: run.passed(1, "put"))
    driver.terminate()
    driver.finish(128 + signal.SIGTERM)
    assert f"resume with: sluice resume {run.run_id}" in driver.errors
    assert "Traceback" not in driver.errors
    return run


@pytest.fixture(scope="module")
def lost_ray(workplace: Workplace, terminated: Run) -> Run:
    """The same run, resumed; in the middle of a step, its driver and Ray are killed."""
    driver = workplace.start("resume", terminated.run_id)
    driver.wait_for(lambda: terminated.committed(3, "put"))
    driver.kill()
    workplace.stop_ray()
    return terminated


def test_a_terminated_driver_leaves_nothing_behind(workplace: Workplace, terminated: Run) -> None:
    assert not workplace.worker_names()


def test_a_lost_ray_and_rare_checkpoints(workplace: Workplace, expected: Run, lost_ray: Run) -> None:
    run = lost_ray
    generated = run.generate_seconds()
    damaged = next((run.path / "columns" / "step-000003").glob("*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    printed = workplace.sluice("resume", run.run_id, *LIMITS)
    assert f"3 of {STEPS} steps are done" in printed
    assert f"step   3/{STEPS}" in printed  # from the checkpoint of version 2, so that one is run again
    assert f"step   2/{STEPS}" not in printed
    assert f"step 3 is run again from its start: chunk {run.run_id}/3/rollout/0/0: the checksum" in printed
    # Its columns survived Ray, so that step 2 was not generated again: the ledger still told when it was.
    assert run.generate_seconds()[2] == generated[2]
    assert_same(run, expected)
    assert [event.kind for event in run.metrics.events()] == ["start", "resume", "resume"]


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


@pytest.fixture(scope="module")
def before(workplace: Workplace, living_driver: Command) -> ServiceState:
    """The Prefect server that the same run has until it is killed, after all workers."""
    living_driver.wait_for(lambda: workplace.run("killed-workers").passed(len(ROLES) + 1, "rollout"))
    state = workplace.services.state("prefect")
    assert state is not None
    workplace.kill_service("prefect")
    return state


def test_a_local_prefect_server_that_was_killed_is_started_again(
    workplace: Workplace, living_driver: Command, before: ServiceState
) -> None:
    printed = living_driver.finish()
    assert "the local Prefect server had died, and was started again" in printed
    for step in range(1, STEPS + 1):  # no step is done twice
        assert printed.count(f"step   {step}/{STEPS}") == 1
    after = workplace.services.state("prefect")
    assert after is not None
    assert (after.port, after.pid == before.pid) == (before.port, False)
    names = ["killed-workers", *(f"killed-workers/step-{step:04d}" for step in range(STEPS))]
    states = workplace.ask(partial(flow_run_states, names))
    assert set(states) == set(names)
    assert [states[name].count("COMPLETED") for name in names] == [1] * len(names)
    assert states[names[-1]] == states[names[0]] == ["COMPLETED"]  # the server was lost in the last step
    assert set(chain(*states.values())) <= {"COMPLETED", "FAILED"}  # a step whose worker was killed was run again


async def flow_run_states(names: list[str], client: PrefectClient) -> dict[str, list[str]]:
    """Return the states of the flow runs of these names that the server knows to have started, by name."""
    found = await client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=names)))
    states = defaultdict[str, list[str]](list)
    for flow_run in found:
        states[flow_run.name].append(str(flow_run.state_type.value))
    return states


def test_a_run_whose_workers_and_server_were_killed_ends_the_same(
    workplace: Workplace, before: ServiceState, living_driver: Command, expected: Run
) -> None:
    living_driver.finish()
    run = workplace.run("killed-workers")
    assert_same(run, expected)
    first, *restarts = run.metrics.events()
    assert first.kind == "start"
    assert {event.kind for event in restarts} == {"restart"}
    assert all(event.reason for event in restarts)
