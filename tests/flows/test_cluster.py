"""`sluice ps` and `sluice stop`, of runs with and without a driver; and the check of nodes."""

import json
import os
import time
from pathlib import Path

import pytest

from infra.ray.health import run_owner
from infra.storage.runs import RunDirectory
from infra.workers.nodes import MAX_CLOCK_SECONDS, find_problem, report_node
from tests.configs import run_config
from tests.services import Workplace

TRAIN = ("train", "tiny.toml", "steps=500", "eval.every_steps=0")


@pytest.mark.slow
def test_a_run_with_a_driver_is_listed_stopped_and_resumed(workplace: Workplace) -> None:
    driver, run = workplace.start(*TRAIN, "--run-id", "stopped"), workplace.run("stopped")
    driver.wait_for(lambda: run.num_done > 0)
    (listed,) = json.loads(workplace.sluice("ps", "--json"))
    assert (listed["run_id"], listed["state"], listed["num_processes"]) == ("stopped", "driven", 4)  # with the index
    assert listed["owner"] == run_owner()
    assert listed["memory_bytes"] > 100 * 2**20
    assert "500" not in workplace.sluice("ps")
    refused = workplace.sluice("resume", "stopped", exit_code=2)
    assert "is being driven by process" in refused
    assert "stop it first: sluice stop stopped" in refused
    printed = workplace.sluice("stop", "stopped")
    assert printed == "stopped stopped; resume with: sluice resume stopped\n"
    driver.finish(143)
    assert workplace.sluice("ps") == "no run has processes in the cluster\n"
    done = run.num_done
    workplace.sluice("resume", "stopped", f"steps={done + 1}")
    assert run.num_done == done + 1


@pytest.mark.slow
def test_a_run_without_a_driver_is_stopped(workplace: Workplace) -> None:
    driver, run = workplace.start(*TRAIN, "--run-id", "driverless"), workplace.run("driverless")
    driver.wait_for(lambda: run.num_done > 0)
    driver.kill()
    assert [listed["run_id"] for listed in json.loads(workplace.sluice("ps", "--json"))] == ["driverless"]
    assert workplace.sluice("stop", "driverless") == "stopped driverless; resume with: sluice resume driverless\n"
    assert json.loads(workplace.sluice("ps", "--json")) == []
    assert not workplace.model_workers()
    assert workplace.sluice("stop", "driverless").startswith("nothing of driverless is running")


def test_a_node_that_lacks_something_is_named(tmp_path: Path) -> None:
    directory = RunDirectory.create(run_config(tmp_path), "checked")
    here = report_node(str(directory.path), [str(tmp_path), str(tmp_path / "absent")])
    assert here.missing == (str(tmp_path / "absent"),)
    assert here.run
    assert abs(here.time - time.time()) < MAX_CLOCK_SECONDS
    assert find_problem(here, here.replace(missing=()), directory) == ""
    assert "lacks" in find_problem(here, here, directory)
    elsewhere = here.replace(run=report_node(str(tmp_path / "other"), []).run)
    assert f"doesn't see the run directory {directory.path}; set runtime.runs_dir" in find_problem(
        here, elsewhere, directory
    )
    older = here.replace(version="0.1.0", missing=())
    assert "has Sluice 0.1.0 on Python" in find_problem(here, older, directory)
    for offset, word in ((3600, "ahead of"), (-3600, "behind")):
        late = here.replace(time=here.time + offset, missing=())
        assert f"has a clock 3600 s {word} the driver's; synchronize" in find_problem(here, late, directory)
    assert os.getcwd() not in here.missing
