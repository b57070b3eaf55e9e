"""Runs that are started from the Prefect UI, by a schedule and by automations, on a real server and a real worker."""

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Scheduled

from flows.events import WINDOW_STEPS
from infra.storage.driver_lock import driver_lock
from tests.deployed import Deployed, receiving_notifications
from tests.run_results import Run
from tests.services import Workplace

pytestmark = pytest.mark.slow

POOL = "local"
LR = 1e-2
NUM_STEPS = 10_000  # of the run that is started by hand: it never ends
EVERY = "checkpoint.every_steps=10000"  # each starts an evaluation and an export
LIMIT = f'runtime.approve_when=["learning_rate > {0.9 * LR}"]'
BY_HAND = [f"steps={NUM_STEPS}", EVERY, "reward.path=tiny_rewards:switched", LIMIT]


@pytest.fixture(scope="module")
def notified() -> Iterator[tuple[str, list[str]]]:
    """A receiver of notifications: its URL, and what it has received."""
    with receiving_notifications() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def deployed(workplace: Workplace, notified: tuple[str, list[str]]) -> Iterator[Deployed]:
    """The tiny config in a process work pool with a worker, with a schedule and all automations."""
    settings = [argument for setting in ("steps=2", EVERY) for argument in ("--set", setting)]
    deploy = ("deploy", "tiny.toml", "--pool", POOL, "--cron", "* * * * *", *settings)
    printed = workplace.sluice(*deploy, exit_code=2)  # starts the services
    assert f"no work pool '{POOL}'" in printed
    assert f"prefect work-pool create {POOL}" in printed
    workplace.ask(lambda client: client.create_work_pool(WorkPoolCreate(name=POOL, type="process")))
    printed = workplace.sluice(*deploy, "--notify", "custom-webhook/absent", exit_code=2)
    assert "no such block" in printed
    url, received = notified
    with temporary_settings({PREFECT_API_URL: workplace.services.prefect_api_url}):
        block = CustomWebhookNotificationBlock(name="hook", url=url, json_data={"text": "{{body}}"})
        block.save("hook")
    reactions = ("--notify", "custom-webhook/hook", "--stalled-minutes", "0.2", "--evaluate", "--export-to", "exports")
    printed = workplace.sluice(*deploy, *reactions)
    for name in ("train/tiny, cron '* * * * *'", "evaluate/sluice", "export/sluice", "prepare-data/sluice"):
        assert f"deployment {name}" in printed
    often = {"PREFECT_WORKER_QUERY_SECONDS": "3"}
    worker = workplace.prefect("worker", "start", "--pool", POOL, environment=often)
    found = Deployed(workplace, worker, received)
    found.pause_schedule(True)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def paused(deployed: Deployed) -> UUID:
    """A run by hand that waits for approval after its first step, and so holds the pool's only slot."""
    flow_run = deployed.start("train/tiny", overrides=BY_HAND, note="by hand")
    deployed.wait_for(deployed.run_of(flow_run).path.exists)  # it has the slot
    deployed.pause_schedule(False)
    deployed.wait_for_state(flow_run, "Paused")
    return flow_run


@pytest.fixture(scope="module")
def scheduled(deployed: Deployed, paused: UUID) -> UUID:
    """A run that the schedule started meanwhile, and that waits for the slot."""
    deployed.wait_for(lambda: any(run.state_name == "Queued" for run in deployed.flow_runs("tiny")))
    deployed.pause_schedule(True)
    flow_run = next(run for run in deployed.flow_runs("tiny") if run.state_name == "Queued")
    assert flow_run.auto_scheduled
    assert "pool 'default'" in (flow_run.state.message or "")
    return flow_run.id


@pytest.fixture(scope="module")
def decided(deployed: Deployed, paused: UUID, scheduled: UUID) -> UUID:
    """The run by hand, after somebody has lowered its learning rate."""
    deployed.wait_for(lambda: any("no step" in text for text in deployed.notified))  # it is stalled
    decision = {"decision": "lower the learning rate", "learning_rate_factor": 0.5}
    deployed.place.ask(lambda client: client.resume_flow_run(paused, run_input=decision))
    deployed.wait_for_steps(paused, 3)
    return paused


@pytest.fixture(scope="module")
def cancelled(deployed: Deployed, decided: UUID) -> UUID:
    """The same run, cancelled while a reward is computed; its processes are gone."""
    deployed.hold.touch()
    processes = deployed.processes(decided)
    assert len(processes) == 3  # the driver, the policy and a rollout worker
    deployed.place.ask(lambda client: client.set_flow_run_state(decided, Cancelling()))
    deployed.wait_for_state(decided, "Cancelled")
    deployed.wait_for(lambda: not any(process.is_running() for process in processes))
    deployed.hold.unlink()
    return decided


@pytest.fixture(scope="module")
def retried(deployed: Deployed, cancelled: UUID) -> UUID:
    """The same run, retried and a few steps further."""
    done = len(deployed.run_of(cancelled).metrics.steps())
    deployed.place.ask(lambda client: client.set_flow_run_state(cancelled, Scheduled(name="AwaitingRetry")))
    deployed.wait_for_steps(cancelled, done + 1)
    return cancelled


@pytest.fixture(scope="module")
def crashed(deployed: Deployed, retried: UUID) -> UUID:
    """The same run, resumed by an automation after its driver was killed."""
    deployed.hold.touch()
    attempts = deployed.flow_run(retried).run_count
    deployed.processes(retried)[0].kill()
    deployed.wait_for(lambda: deployed.flow_run(retried).run_count > attempts)
    deployed.hold.unlink()
    return retried


@pytest.fixture(scope="module")
def collapsed(deployed: Deployed, crashed: UUID) -> UUID:
    """The same run, suspended by an automation because its reward collapsed; its processes are gone."""
    collapse = deployed.place.folder / "collapse"
    resumed_at = len(deployed.run_of(crashed).metrics.steps())
    deployed.wait_for_steps(crashed, resumed_at + WINDOW_STEPS)
    collapse.touch()
    deployed.wait_for_state(crashed, "Suspended")
    deployed.wait_for(lambda: not deployed.processes(crashed))
    collapse.unlink()
    return crashed


def test_parameters_are_flat_and_described(deployed: Deployed) -> None:
    deployment = deployed.place.ask(lambda client: client.read_deployment_by_name("train/tiny"))
    properties = deployment.parameter_openapi_schema["properties"]
    assert list(properties) == ["config", "overrides", "run_id", "note"]
    assert all(entry["description"] for entry in properties.values())
    with pytest.raises(PrefectHTTPStatusError, match="steps"):
        deployed.start("train/tiny", overrides="steps")


def test_a_paused_run_goes_on_as_decided(deployed: Deployed, decided: UUID) -> None:
    run = deployed.run_of(decided)
    assert json.loads((run.path / "config.json").read_text())["note"] == "by hand"
    assert [report.metrics["learning_rate"] for report in run.metrics.steps()[:3]] == pytest.approx(
        [LR, LR / 2, LR / 2]
    )


def test_a_cancelled_run_can_be_resumed(deployed: Deployed, cancelled: UUID) -> None:
    run = deployed.run_of(cancelled)
    with driver_lock(run):
        assert len(run.metrics.steps()) >= 3


@pytest.fixture(scope="module")
def checkpoint(deployed: Deployed, scheduled: UUID, cancelled: UUID) -> Run:
    """The scheduled run at its end; no later checkpoint is evaluated or exported."""
    ended = deployed.wait_for_state(scheduled, "Completed", "Failed", "Crashed")
    assert ended.state_name == "Completed", ended.state
    run = deployed.run_of(scheduled)
    names = {f"{flow}-{run.run_id}" for flow in ("evaluate", "export")}
    deployed.wait_for(lambda: names <= {flow_run.name for flow_run in deployed.flow_runs("sluice")})

    async def pause(client: PrefectClient) -> None:
        for automation in await client.read_automations():
            if automation.name in ("sluice: tiny: evaluate", "sluice: tiny: export"):
                await client.pause_automation(automation.id)

    deployed.place.ask(pause)
    return run


def test_a_scheduled_run_gets_its_turn(checkpoint: Run) -> None:
    assert len(checkpoint.metrics.steps()) == 2


@pytest.mark.parametrize("flow", ["evaluate", "export"])
def test_a_checkpoint_is_evaluated_and_exported(deployed: Deployed, checkpoint: Run, flow: str) -> None:
    name = f"{flow}-{checkpoint.run_id}"
    deployed.wait_for(
        lambda: any(found.name == name and found.state_name == "Completed" for found in deployed.flow_runs("sluice"))
    )
    if flow == "export":
        assert (deployed.place.folder / "exports" / f"{checkpoint.run_id}-2" / "config.json").exists()


def test_a_run_that_was_cancelled_crashed_and_suspended_goes_on(deployed: Deployed, collapsed: UUID) -> None:
    run = deployed.run_of(collapsed)

    def has_ended() -> bool:  # else Prefect's worker, which knows the run as running, does not start it again
        printed = deployed.worker.printed.rpartition("Suspended by Automation")[2]
        return f"Process for flow run '{run.run_id}' exited" in printed

    deployed.wait_for(has_ended)
    deployed.place.ask(lambda client: client.resume_flow_run(collapsed))
    deployed.wait_for_steps(collapsed, run.num_done + 1)
    deployed.place.ask(lambda client: client.set_flow_run_state(collapsed, Cancelling()))
    ended = deployed.wait_for_state(collapsed, "Cancelled", "Completed", "Failed")
    assert (ended.name, ended.state_name) == (run.run_id, "Cancelled")
    kinds = [event.kind for event in run.metrics.events()]
    assert kinds == ["start", "resume", "resume", "resume"]  # after the cancellation, the crash and the suspension


def test_a_run_is_brought_to_its_end_by_another_flow_run(deployed: Deployed, collapsed: UUID) -> None:
    run = deployed.run_of(collapsed)
    steps = run.num_done + 2
    overrides = [setting for setting in BY_HAND if not setting.startswith("steps=")]
    flow_run = deployed.start("train/tiny", overrides=[f"steps={steps}", *overrides], run_id=run.run_id)
    ended = deployed.wait_for_state(flow_run, "Completed", "Failed", "Crashed")
    assert ended.state_name == "Completed", ended.state
    assert ended.name == run.run_id
    assert [report.step for report in run.metrics.steps()] == list(range(steps))


def test_refused_input_is_the_message_of_the_failed_state(deployed: Deployed, scheduled: UUID) -> None:
    refused = deployed.start("train/tiny", overrides=["optim.lr=-1"])
    other = deployed.start("train/tiny", overrides=["optim.lr=1"], run_id=deployed.run_of(scheduled).run_id)
    deployed.place.ask(lambda client: client.set_flow_run_state(scheduled, Scheduled(name="AwaitingRetry")))
    for flow_run, message in (
        (refused, "ConfigError: tiny.toml: optim.lr = -1: Input should be greater than 0"),
        (other, "can't be resumed with a different optim.lr"),
    ):
        state = deployed.wait_for_state(flow_run, "Failed", "Completed", "Crashed").state
        assert state.name == "Failed"
        assert message in state.message
        assert "\n" not in state.message
    deployed.wait_for(lambda: "was complete already" in (deployed.flow_run(scheduled).state.message or ""))


def test_the_deployments_of_prefect_yaml(workplace: Workplace, deployed: Deployed) -> None:
    folder = workplace.folder / "cloned"
    folder.mkdir()
    (folder / "prefect.yaml").write_text((Path(__file__).parents[2] / "deploy" / "prefect.yaml").read_text())
    kinds = ("process", "docker", "kubernetes")
    for kind in kinds:
        workplace.ask(lambda client, kind=kind: client.create_work_pool(WorkPoolCreate(name=kind, type=kind)))
    environment = {"SLUICE_IMAGE": "sluice:test", "SLUICE_FOLDER": "/data"}
    workplace.prefect("--no-prompt", "deploy", "--all", cwd=folder, environment=environment).finish()
    made = {
        kind: workplace.ask(lambda client, kind=kind: client.read_deployment_by_name(f"train/{kind}")) for kind in kinds
    }
    assert {kind: found.work_pool_name for kind, found in made.items()} == dict(zip(kinds, kinds, strict=True))
    assert all(found.job_variables["env"]["PYTHONSAFEPATH"] == "1" for found in made.values())
    assert made["docker"].job_variables["image"] == "sluice:test"
    assert made["docker"].job_variables["volumes"] == ["/data:/opt/sluice"]
    assert not made["kubernetes"].schedules[0].active
