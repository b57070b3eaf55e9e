"""A run from a terminal is listed, stopped, resumed and cancelled in the Prefect UI."""

import json
import re

import pytest
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.states import Cancelling

from infra.ray.health import run_owner
from tests.support.run_results import Run
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

RUN_ID = "listed"


@pytest.fixture(scope="module")
def stopped(workplace: Workplace) -> Run:
    """A run that was listed while it had a driver, and then stopped."""
    run = workplace.run(RUN_ID)
    driver = workplace.start("train", "tiny.toml", "steps=10000", "eval.every_steps=0", "--run-id", RUN_ID)
    driver.wait_for(lambda: run.num_done > 0)

    def is_driven() -> bool:  # a process that is busy may answer too late
        (listed,) = json.loads(workplace.sluice("ps", "--json"))
        assert (listed["run_id"], listed["num_processes"]) == (RUN_ID, 3)  # with the index
        answered = listed["state"] == "driven" and listed["memory_bytes"] > 100 * 2**20
        return answered and listed["owner"] == run_owner()

    driver.wait_for(is_driven)
    driver.wait_for(lambda: re.search(rf"{RUN_ID}.*driven", workplace.sluice("ps")) is not None)
    refused = workplace.sluice("resume", RUN_ID, exit_code=2)
    assert "is being driven by process" in refused
    assert f"stop it first: sluice stop {RUN_ID}" in refused
    assert workplace.sluice("stop", RUN_ID) == f"stopped {RUN_ID}; resume with: sluice resume {RUN_ID}\n"
    driver.finish(143)
    return run


def test_a_run_with_a_driver_is_listed_and_stopped(workplace: Workplace, stopped: Run) -> None:
    assert workplace.sluice("ps") == "no run has processes in the cluster\n"


def test_a_stopped_run_is_resumed_and_can_be_cancelled_in_the_ui(workplace: Workplace, stopped: Run) -> None:
    done = stopped.num_done
    driver = workplace.start("resume", RUN_ID)
    driver.wait_for(lambda: stopped.num_done > done)
    chosen = FlowRunFilter(name=FlowRunFilterName(any_=[RUN_ID]))
    flow_runs = workplace.ask(lambda client: client.read_flow_runs(flow_run_filter=chosen))
    (flow_run,) = (found for found in flow_runs if found.state_name == "Running")
    workplace.ask(lambda client: client.set_flow_run_state(flow_run.id, Cancelling()))
    printed = driver.finish(exit_code=1)
    assert "cancelled in the Prefect UI" in printed
    assert f"resume with: sluice resume {RUN_ID}" in printed
    assert "Traceback" not in printed
    assert workplace.ask(lambda client: client.read_flow_run(flow_run.id)).state_name == "Cancelled"
    workplace.wait_for_no_workers()
