"""Runs that are started from the Prefect UI, by a schedule and by automations, on a real server and a real worker."""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow, runtime
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import Pause, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Scheduled, Suspended

from flows.lifecycle.cancellation import cancellable
from flows.ui.events import WINDOW_STEPS
from tests.support.commands import sluice_in_turn
from tests.support.deploy_files import ROOT
from tests.support.deployed import Deployed, receiving_notifications
from tests.support.run_results import Run
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

POOL = "local"
LR = 1e-2
LEAP_DAY = "0 0 29 2 *"  # nothing of this schedule is due during the tests
EVERY = "checkpoint.every_steps=10000"  # each starts an evaluation and an export: only the one at the end is saved
LIMIT = f'approval.when=["learning_rate > {0.9 * LR}"]'
TRAINED = [EVERY, "reward.path=tiny_rewards:switched", "reward.timeout_seconds=inf", LIMIT]  # a reward may be held
BY_HAND = ["steps=10000", *TRAINED]  # it never ends by itself


@pytest.fixture(scope="module")
def notified() -> Iterator[tuple[str, list[str]]]:
    """A receiver of notifications: its URL, and what it has received."""
    with receiving_notifications() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def deployed(workplace: Workplace, notified: tuple[str, list[str]]) -> Iterator[Deployed]:
    """The tiny config in a process work pool with a worker, with a schedule and all automations."""
    workplace.services.start(prefect=True, ray=False)
    workplace.ask(lambda client: client.create_work_pool(WorkPoolCreate(name=POOL, type="process")))
    url, received = notified
    with temporary_settings({PREFECT_API_URL: workplace.services.prefect_api_url}):
        block = CustomWebhookNotificationBlock(name="hook", url=url, json_data={"text": "{{body}}"})
        block.save("hook")
    deploy = ("deploy", "tiny.toml", "--cron", LEAP_DAY, "--set", "steps=2", "--set", EVERY)
    reactions = ("--notify", "custom-webhook/hook", "--stalled-minutes", "0.2", "--evaluate", "--export-to", "exports")
    without_pool, without_block, (exit_code, printed) = sluice_in_turn(
        workplace,
        (*deploy, "--pool", "absent"),
        (*deploy, "--pool", POOL, "--notify", "custom-webhook/absent"),
        (*deploy, "--pool", POOL, *reactions),
    )
    for refused, parts in (
        (without_pool, ("no work pool 'absent'", "prefect work-pool create absent")),
        (without_block, ("no such block",)),
    ):
        assert refused[0] == 2
        assert all(part in refused[1] for part in parts), refused
    assert exit_code == 0, printed
    for name in (f"train/tiny, cron {LEAP_DAY!r}", f"evaluate/{POOL}", f"export/{POOL}", f"prepare-data/{POOL}"):
        assert f"deployment {name}" in printed
    often = {"PREFECT_WORKER_QUERY_SECONDS": "3"}
    worker = workplace.prefect("worker", "start", "--pool", POOL, environment=often)
    found = Deployed(workplace, worker, received)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def paused(deployed: Deployed) -> UUID:
    """A run by hand that waits for approval after its first step, and holds the pool's only slot meanwhile."""
    flow_run = deployed.start("train/tiny", overrides=BY_HAND, note="by hand")
    deployed.wait_for_state(flow_run, "Paused")
    pool = deployed.place.ask(lambda client: client.read_global_concurrency_limit_by_name("sluice-default"))
    assert (pool.limit, pool.active_slots) == (1, 1)
    return flow_run


@pytest.fixture(scope="module")
def decided(deployed: Deployed, paused: UUID) -> UUID:
    """The same run, after somebody has lowered its learning rate."""
    deployed.wait_for(lambda: any("no step" in text for text in deployed.notified))  # it is stalled
    decision = {"decision": "lower the learning rate", "learning_rate_factor": 0.5}
    deployed.place.ask(lambda client: client.resume_flow_run(paused, run_input=decision))
    deployed.wait_for_steps(paused, 3)
    return paused


@pytest.fixture(scope="module")
def crashed(deployed: Deployed, decided: UUID) -> UUID:
    """The same run, resumed by an automation after its driver was killed while a reward was computed."""
    deployed.hold.touch()
    attempts = deployed.flow_run(decided).run_count
    deployed.processes(decided)[0].kill()
    deployed.wait_for(lambda: deployed.flow_run(decided).run_count > attempts)
    deployed.hold.unlink()
    return decided


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


@pytest.fixture(scope="module")
def resumed(deployed: Deployed, collapsed: UUID) -> UUID:
    """The same run, resumed in the UI and a step further; then a reward is computed for as long as there is `hold`."""
    run = deployed.run_of(collapsed)
    # Else Prefect's worker, which knows the run as running, might not start it again.
    deployed.wait_for(lambda: deployed.num_events(collapsed, "executed") == deployed.num_events(collapsed, "submitted"))
    deployed.place.ask(lambda client: client.resume_flow_run(collapsed))
    deployed.wait_for_steps(collapsed, run.num_done + 1)
    deployed.hold.touch()
    return collapsed


@pytest.fixture(scope="module")
def scheduled(deployed: Deployed, resumed: UUID) -> UUID:
    """A flow run that the schedule has started for the same run, and that waits for the end of its driver."""
    run = deployed.run_of(resumed)
    steps = run.num_done + 3  # one of them may be in progress
    deployed.schedule("* * * * *", overrides=[f"steps={steps}", *TRAINED], run_id=run.run_id)

    def due() -> list[UUID]:
        return [
            found.id for found in deployed.flow_runs("tiny") if found.auto_scheduled and not found.state.is_scheduled()
        ]

    deployed.wait_for(lambda: bool(due()))
    deployed.pause()  # before the next one is due, which might drive the run first
    (flow_run,) = due()
    deployed.wait_for(lambda: deployed.has_logged(flow_run, "another process drives"))
    assert deployed.flow_run(flow_run).state_name == "Running"
    return flow_run


@pytest.fixture(scope="module")
def cancelled(deployed: Deployed, resumed: UUID, scheduled: UUID) -> UUID:
    """The run, cancelled while a reward is computed; its processes are gone."""
    processes = deployed.processes(resumed)
    assert len(processes) == 3  # the driver, the policy and a rollout worker
    deployed.place.ask(lambda client: client.set_flow_run_state(resumed, Cancelling()))
    ended = deployed.wait_for_state(resumed, "Cancelled", "Completed", "Failed")
    assert (ended.name, ended.state_name) == (deployed.run_of(resumed).run_id, "Cancelled")
    deployed.wait_for(lambda: not any(process.is_running() for process in processes))
    return resumed


@pytest.fixture(scope="module")
def completed(deployed: Deployed, cancelled: UUID, scheduled: UUID) -> Run:
    """The run at its end, to which the scheduled flow run has brought it."""
    deployed.hold.unlink()
    ended = deployed.wait_for_state(scheduled, "Completed", "Failed", "Crashed")
    assert ended.state_name == "Completed", ended.state
    assert ended.name == deployed.run_of(cancelled).run_id
    return deployed.run_of(cancelled)


def test_parameters_are_flat_and_described(deployed: Deployed) -> None:
    deployment = deployed.place.ask(lambda client: client.read_deployment_by_name("train/tiny"))
    properties = deployment.parameter_openapi_schema["properties"]
    assert list(properties) == ["config", "overrides", "run_id", "note"]
    assert all(entry["description"] for entry in properties.values())
    with pytest.raises(PrefectHTTPStatusError, match="steps"):
        deployed.start("train/tiny", overrides="steps")


def test_a_run_waits_for_a_slot_of_its_pool(deployed: Deployed, paused: UUID) -> None:
    waiting = deployed.start("train/tiny")
    state = deployed.wait_for_state(waiting, "Queued", "Completed", "Failed", "Crashed").state
    assert "pool 'default'" in (state.message or "")
    deployed.place.ask(lambda client: client.set_flow_run_state(waiting, Cancelling()))
    assert deployed.wait_for_state(waiting, "Cancelled", "Completed", "Failed").state_name == "Cancelled"


def test_a_paused_run_goes_on_as_decided(deployed: Deployed, decided: UUID) -> None:
    run = deployed.run_of(decided)
    assert json.loads((run.path / "config.json").read_text())["note"] == "by hand"
    assert [report.metrics["learning_rate"] for report in run.metrics.steps()[:3]] == pytest.approx(
        [LR, LR / 2, LR / 2]
    )


def test_a_run_that_crashed_and_was_suspended_and_cancelled_is_brought_to_its_end(completed: Run) -> None:
    reports = completed.metrics.steps()
    assert [report.step for report in reports] == list(range(completed.config().steps))
    # A step that was begun with the collapsed reward may be run again as a whole, with the other one: a restart.
    kinds = [event.kind for event in completed.metrics.events() if event.kind != "restart"]
    assert kinds == ["start", "resume", "resume", "resume"]  # after the crash, the suspension and the cancellation


@pytest.mark.parametrize("flow", ["evaluate", "export"])
def test_its_checkpoint_is_evaluated_and_exported(deployed: Deployed, completed: Run, flow: str) -> None:
    name = f"{flow}-{completed.run_id}"
    deployed.wait_for(
        lambda: any(found.name == name and found.state_name == "Completed" for found in deployed.flow_runs(POOL))
    )
    if flow == "export":
        exported = f"{completed.run_id}-{completed.config().steps}"
        assert (deployed.place.folder / "exports" / exported / "config.json").exists()


def test_a_retry_of_a_complete_run_ends_at_once_and_refused_input_is_the_message_of_the_failed_state(
    deployed: Deployed, cancelled: UUID, completed: Run
) -> None:
    refused = deployed.start("train/tiny", overrides=["optim.lr=-1"])
    deployed.place.ask(lambda client: client.set_flow_run_state(cancelled, Scheduled(name="AwaitingRetry")))
    state = deployed.wait_for_state(refused, "Failed", "Completed", "Crashed").state
    assert state.name == "Failed"
    assert "ConfigError: tiny.toml: optim.lr = -1: Input should be greater than 0" in state.message
    assert "\n" not in state.message
    deployed.wait_for(lambda: "was complete already" in (deployed.flow_run(cancelled).state.message or ""))


def test_a_run_ends_if_the_event_of_its_suspension_is_lost(deployed: Deployed) -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("work")

    @flow
    async def suspended() -> None:  # not a deployment's: Prefect itself tells it nothing
        async with get_client() as client:
            await client.set_flow_run_state(UUID(runtime.flow_run.id), Suspended(), force=True)
        await cancellable(work())

    with temporary_settings({PREFECT_API_URL: deployed.place.services.prefect_api_url}), pytest.raises(Pause):
        asyncio.run(suspended())
    assert cleaned == ["work"]


def commit_all(folder: Path, url: str) -> str:
    """Make a folder a Git repository with one commit of all its files and a remote; return the commit."""
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com"]
    for words in (
        ["init", "--quiet"],
        ["remote", "add", "origin", url],
        ["add", "--all"],
        ["commit", "-qm", "configs"],
    ):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_deployments_of_prefect_yaml(workplace: Workplace, deployed: Deployed) -> None:
    folder = workplace.folder / "cloned"
    folder.mkdir()
    (folder / "prefect.yaml").write_text((ROOT / "prefect.yaml").read_text())
    commit = commit_all(folder, "https://example.com/you/sluice.git")
    (programs := folder / "programs").mkdir()
    (programs / "docker").write_text(f'#!/bin/sh\necho "$@" >> {folder}/docker.log\n')  # keeps what it is asked for
    (programs / "docker").chmod(0o755)
    kinds = ("process", "docker", "kubernetes")
    for kind in kinds:
        workplace.ask(lambda client, kind=kind: client.create_work_pool(WorkPoolCreate(name=kind, type=kind)))
    environment = {
        "SLUICE_IMAGE": "here/sluice",
        "SLUICE_FOLDER": "/data",
        "SLUICE_REPOSITORY": "https://example.com/x",
    }
    environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    workplace.prefect("--no-prompt", "deploy", "--all", cwd=folder, environment=environment).finish()
    made = {
        kind: workplace.ask(lambda client, kind=kind: client.read_deployment_by_name(f"train/{kind}")) for kind in kinds
    }
    assert {kind: found.work_pool_name for kind, found in made.items()} == dict(zip(kinds, kinds, strict=True))
    assert all(found.job_variables["env"]["PYTHONSAFEPATH"] == "1" for found in made.values())
    image = f"here/sluice:{commit}"
    for kind in kinds[1:]:
        assert made[kind].job_variables["image"] == image
        (clone,) = made[kind].pull_steps
        assert clone == {
            "prefect.deployments.steps.git_clone": {"repository": "https://example.com/x", "commit_sha": commit}
        }
    built = ["build", "--file", "deploy/Dockerfile", "--target", "engine", "--tag", image, "."]
    calls = [line.split() for line in (folder / "docker.log").read_text().splitlines()]
    assert calls == 2 * [built, ["push", image]]
    assert {found.version for found in made.values()} == {commit[:8]}
    assert not made["kubernetes"].schedules[0].active
