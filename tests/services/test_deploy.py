"""What `sluice deploy` creates on a real Prefect server, and deployed flows that find a run in another state."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import State, flow
from prefect.automations import Automation
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Crashed, Pending, Running

from flows.deployments import entrypoints
from flows.lifecycle.cancellation import set_state
from infra.storage.driver_lock import is_driven
from infra.storage.runs import RunDirectory
from schemas.config.load import load_config
from schemas.errors import RunError
from schemas.step import RunSummary, StepReport
from tests.support.commands import sluice_in_turn
from tests.support.workplace import Command, Workplace

pytestmark = pytest.mark.extended

POOL, OTHER_POOL = "gpus", "others"
HOLDER = """
import fcntl, sys

with open(sys.argv[1], "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def deployed(workplace: Workplace) -> list[tuple[int, str]]:
    """The exit codes and outputs of `sluice deploy`."""
    workplace.services.start(prefect=True, ray=False)
    for pool in (POOL, OTHER_POOL):
        workplace.ask(lambda client, pool=pool: client.create_work_pool(WorkPoolCreate(name=pool, type="process")))
    (workplace.folder / "other.toml").symlink_to("tiny.toml")
    return sluice_in_turn(
        workplace,
        ("deploy", "tiny.toml", "--pool", POOL, "--evaluate", "--export-to", "exports"),
        ("deploy", "tiny.toml", "--pool", OTHER_POOL),
        ("deploy", "other.toml", "--pool", OTHER_POOL, "--no-overlap"),
    )


@pytest.fixture
def api(workplace: Workplace, deployed: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(workplace.folder)
    with temporary_settings({PREFECT_API_URL: workplace.services.prefect_api_url}):
        yield


def test_a_run_that_can_wait_for_the_server_is_not_marked_as_crashed(
    deployed: list[tuple[int, str]], api: None
) -> None:
    assert deployed[0][0] == 0, deployed
    patience = load_config(Path("tiny.toml")).services.prefect_patience_seconds
    silent = Automation.read(name="sluice: train/tiny: silent")
    assert silent.trigger.within.total_seconds() == patience + 90  # three heartbeats


def test_a_second_process_of_a_living_run_waits_for_its_end(api: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(load_config(Path("tiny.toml")), "living")
    looks = []

    def look(directory: RunDirectory) -> bool:
        looks.append(is_driven(directory))
        return looks[-1]

    monkeypatch.setattr(entrypoints, "is_driven", look)
    monkeypatch.setattr(entrypoints, "POLL_SECONDS", 0.05)
    arguments = [sys.executable, "-c", HOLDER, str(run.path / "driver.lock")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdout.readline()

        async def call() -> str:
            second = asyncio.ensure_future(entrypoints.train("tiny.toml", run_id="living", return_state=True))
            while len(looks) < 3 and not second.done():
                await asyncio.sleep(0.01)
            assert not second.done()
            run.write_summary(summary(run))
            driver.stdin.close()
            return str((await second).message)

        assert asyncio.run(call()) == "run living was complete already: 4 of 4 steps"
    assert looks[:2] == [True, True]
    assert not looks[-1]


def test_a_deployment_of_another_pool_or_folder_is_not_replaced(
    workplace: Workplace, deployed: list[tuple[int, str]], api: None, tmp_path: Path
) -> None:
    refused = f"deployment train/tiny of the work pool {POOL}, folder {workplace.folder}, which would be replaced"
    assert [code for code, _ in deployed] == [0, 2, 0], deployed
    assert refused in " ".join(deployed[1][1].split())
    for name in ("tiny.toml", "model", "train.parquet", "eval.parquet", "tiny_rewards.py"):
        (tmp_path / name).symlink_to(workplace.folder / name)
    elsewhere = Command(
        workplace,
        *("-P", "-m", "flows.cli.main", "deploy", "tiny.toml", "--pool", POOL),
        cwd=tmp_path,
        environment={"PREFECT_API_URL": str(workplace.services.prefect_api_url)},
    )
    assert refused in " ".join(elsewhere.finish(2).split())
    evaluate = workplace.ask(lambda client: client.read_deployment_by_name(f"evaluate/{POOL}"))
    assert evaluate.work_pool_name == POOL
    for name in ("evaluate", "export"):
        (action,) = Automation.read(name=f"sluice: train/tiny: {name}").actions
        assert action.job_variables["working_dir"] == str(workplace.folder)


def test_a_run_that_crashes_again_and_again_without_a_step_has_failed(api: None) -> None:
    run = RunDirectory.create(load_config(Path("tiny.toml")), "crashing")

    async def can_go_on(*states: State) -> bool:
        for state in states:
            await set_state(state)
        try:
            await entrypoints._require_progress([run])
        except RunError:
            return False
        return True

    @flow
    async def attempts() -> None:
        crashes = [Crashed() for _ in range(entrypoints.CRASHES)]
        assert await can_go_on(*crashes[1:])
        assert not await can_go_on(Crashed())
        failed = await entrypoints.train.fn("tiny.toml", run_id=run.run_id)
        assert "crashed 5 times without finishing a step" in failed.message
        assert await can_go_on(failed, *crashes[1:])  # after a retry by hand
        assert not await can_go_on(Crashed())
        report = StepReport(
            step=0, policy_version=1, metrics={}, seconds=1.0, seconds_by_phase={}, started_at=time.time()
        )
        run.metrics.append_step(report)
        assert await can_go_on(Running())

    asyncio.run(attempts())


def test_without_overlap_a_second_run_of_a_config_is_cancelled(workplace: Workplace, deployed: object) -> None:
    async def start(client: PrefectClient) -> list[str]:
        deployment = await client.read_deployment_by_name("train/other")
        runs = [await client.create_flow_run_from_deployment(deployment.id) for _ in range(2)]
        states = [(await client.set_flow_run_state(run.id, Pending())).state for run in runs]
        await client.set_flow_run_state(runs[0].id, Cancelled(), force=True)
        return [state.name for state in states if state is not None]

    assert workplace.ask(start) == ["Pending", "Cancelled"]


def summary(run: RunDirectory) -> RunSummary:
    """Return the summary of a run that is complete."""
    return RunSummary(
        run_id=run.run_id,
        steps=run.config().steps,
        reward_first=0.0,
        reward_last=0.0,
        accuracy_before=None,
        accuracy_after=None,
        seconds=1.0,
        tokens_per_second=1.0,
        seconds_by_phase={},
        store_bytes_at_end=0,
        prefect_ui="",
    )
