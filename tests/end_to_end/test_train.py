"""Whole runs through the command, on a real Prefect server and a real Ray: what they write, show and cost.

Two runs of the same config: one goes to its end; the other has two rollout workers, and fails.
"""

import json
import os
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.schedules import CronSchedule

from infra.storage.runs import RunDirectory
from infra.variables import LOCAL_RAY_VARIABLES, RAY_VARIABLES, TORCH_VARIABLES
from schemas.config.changes import scoring_digest
from schemas.metric_catalog import metric_spec, metrics_of
from schemas.step import RunSummary
from tests.support.browser import PHONE, open_browser
from tests.support.command import make_command
from tests.support.progress import wait_until
from tests.support.workplace import Command, Workplace

RUN_ID, FAILING = "whole", "failing"
VARIABLES = "variables.json"  # of the workers of the first run
OF_SPEED = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "PYTORCH_", "REPORTER_")
STEPS, STEP = 3, 1  # the step whose requests are counted is neither the first nor the last
CONFIG = (
    *("reward.path=breaking_rewards:sometimes", "reward.max_failure_fraction=0.9", "kl.coef=0.01"),
    *("data.max_prompt_tokens=9", "data.overlong=drop"),
    *("rollout.batch_prompts=1", "eval.every_steps=1", "eval.batch_prompts=1"),
)
REWARDS = """
import pathlib
import tiny_rewards

def sometimes(prompt, completion, answer, info):
    if pathlib.Path("broken").exists():
        raise RuntimeError("no opinion at all")
    return tiny_rewards.sometimes(prompt, completion, answer, info)
"""
# The command, which writes its requests to a file, one line each, in the order in which they were sent; and then what
# its own process has read from the column store.
COUNTED_COMMAND = """
import os, re
import httpx

requests = open(os.environ["REQUESTS"], "w", buffering=1)

def recorded(send):
    def record(self, request):
        print(request.method, re.sub("[0-9a-f-]{36}", "ID", request.url.path), file=requests)
        return send(self, request)
    return record

httpx.HTTPTransport.handle_request = recorded(httpx.HTTPTransport.handle_request)
httpx.AsyncHTTPTransport.handle_async_request = recorded(httpx.AsyncHTTPTransport.handle_async_request)

from flows.cli import main as cli
from infra.stores.base import ColumnStore
try:
    cli.main()
finally:
    print("driver read", ColumnStore.bytes_read, "bytes of columns")
"""
# The server returns at most 200, of all runs.
OWN_ARTIFACTS = {"artifact_filter": ArtifactFilter(key=ArtifactFilterKey(like_=f"{RUN_ID}-"))}
NEW_FLOW_RUN = "POST /api/flow_runs/"
OF_TIME = (  # lines sent every few seconds, the look for a cancellation, and for the flow runs of old steps
    *("POST /api/logs/", "GET /api/flow_runs/ID", "POST /api/flow_runs/filter", "DELETE /api/flow_runs/ID"),
)


def start_counted(workplace: Workplace, run_id: str, *overrides: str) -> Command:
    """Start a run of the config whose requests are written to a file."""
    environment = {"REQUESTS": str(workplace.folder / f"{run_id}.requests")}
    arguments = ("train", "tiny.toml", "--run-id", run_id, *CONFIG, *overrides)
    return Command(workplace, "-P", "-c", COUNTED_COMMAND, *arguments, environment=environment)


def requests_of_step(workplace: Workplace, run_id: str) -> Counter[str]:
    """Return the requests from the start of a step to the start of the next, by method and route."""
    requests = (workplace.folder / f"{run_id}.requests").read_text().splitlines()
    _, *starts = (at for at, request in enumerate(requests) if request == NEW_FLOW_RUN)  # the first is of the run
    own = requests[starts[STEP] : starts[STEP + 1]]
    return Counter(request for request in own if request not in OF_TIME)


def task_runs_of_step(workplace: Workplace, run_id: str) -> Counter[str]:
    """Return the step's task runs by the task's name."""
    chosen = FlowRunFilter(name=FlowRunFilterName(any_=[f"{run_id}/step-{STEP:04d}"]))

    async def ask(client: PrefectClient) -> Counter[str]:
        return Counter(run.name.rpartition("-")[0] for run in await client.read_task_runs(flow_run_filter=chosen))

    wait_until(lambda: workplace.ask(ask)["publish"] > 0)  # the server records them with a delay
    return workplace.ask(ask)


@pytest.fixture(scope="module")
def printed(workplace: Workplace) -> str:
    """Return the output of a run whose reward fails for half of the samples."""
    (workplace.folder / "breaking_rewards.py").write_text(REWARDS)
    driver = start_counted(workplace, RUN_ID, f"steps={STEPS}", 'monitors=[{kind="tensorboard"}]')
    driver.wait_standing(lambda: workplace.run(RUN_ID).num_done > 0)
    workers = [worker.environ() | {"niceness": worker.nice()} for worker in workplace.model_workers()]
    (workplace.folder / VARIABLES).write_text(json.dumps(workers))
    driver.resume()
    return driver.finish()


@pytest.fixture(scope="module")
def failure(workplace: Workplace, printed: str) -> str:
    """Return the output of the same run with two rollout workers, and a reward that raises always after some steps."""
    run, broken = workplace.run(FAILING), workplace.folder / "broken"
    driver = start_counted(workplace, FAILING, "steps=10000", "rollout.num_workers=2")
    driver.wait_for(lambda: run.num_done > STEP + 1)
    broken.touch()
    failed = driver.finish(exit_code=1)
    broken.unlink()
    return failed


@pytest.fixture(scope="module")
def directory(workplace: Workplace, printed: str) -> RunDirectory:
    return RunDirectory(workplace.folder / "runs" / RUN_ID)


def test_workers_of_a_users_run_have_the_variables_of_the_tests(workplace: Workplace, printed: str) -> None:
    """Else the tests would be faster or steadier than what they test; see `infra.variables`."""
    workers = json.loads((workplace.folder / VARIABLES).read_text())
    assert len(workers) == 3  # policy, reference and rollouts
    settings = {*TORCH_VARIABLES, *RAY_VARIABLES, *LOCAL_RAY_VARIABLES}
    assert settings <= os.environ.keys()
    # Ray itself sets OMP_NUM_THREADS in an actor's process, to 1 as here.
    settings |= {name for name in os.environ if name.startswith(OF_SPEED)} - {"OMP_NUM_THREADS"}
    own = {name: os.environ[name] for name in settings} | {"niceness": os.nice(0)}
    for worker in workers:
        assert {name: worker.get(name) for name in own} == own


def test_the_driver_reads_no_column(printed: str) -> None:
    assert "driver read 0 bytes of columns" in printed


def test_the_terminal_shows_the_ui_each_step_and_the_end(workplace: Workplace, printed: str) -> None:
    lines = printed.splitlines()
    assert lines[0].startswith("Prefect UI: http://127.0.0.1:")
    for step in range(1, STEPS + 1):
        line = next(line for line in lines if line.startswith(f"step   {step}/{STEPS}"))
        for part in ("reward", "response", "kl", "tok/s", "rollout", "update"):
            assert part in line
    assert "held-out accuracy" in printed
    assert "Traceback" not in printed


def test_the_summary_and_the_metrics(directory: RunDirectory) -> None:
    summary = json.loads((directory.path / "summary.json").read_text())
    assert set(summary) == set(RunSummary.model_fields)
    assert summary["steps"] == STEPS
    assert summary["store_bytes_at_end"] == 0
    assert summary["prefect_ui"].startswith("http://127.0.0.1:")
    assert "/runs/flow-run/" in summary["prefect_ui"]
    assert set(summary["seconds_by_phase"]) == {
        *("open", "rollout", "put", "reference", "advantage", "update", "publish"),
    }
    steps = directory.metrics.steps()
    assert [report.step for report in steps] == list(range(STEPS))
    config = directory.config()
    # In the run's, the device is "auto", and whether prompts are shared isn't set.
    chosen = config.replace(
        runtime=config.runtime.replace(device="cpu"), packing=config.packing.replace(share_prompts=True)
    )
    assert {report.config for report in steps} == {scoring_digest(chosen)}
    assert summary["reward_first"] == steps[0].metrics["reward"]  # of 3 steps
    assert summary["reward_last"] == steps[-1].metrics["reward"]
    assert [report.policy_version for report in directory.metrics.evals()] == list(range(STEPS + 1))
    assert any((directory.path / "tensorboard").iterdir())


def test_every_metric_is_in_the_catalog(workplace: Workplace, directory: RunDirectory) -> None:
    for report in directory.metrics.steps():
        for name in report.metrics:
            metric_spec(name)
    others = {"reward/kl", "cross_entropy", "epoch", "teacher/kl", "teacher/divergence"}  # of other settings
    assert {spec.name for spec in metrics_of("terminal")} - report.metrics.keys() == others


def test_a_reward_that_raises_is_counted_masked_and_a_warning(directory: RunDirectory, printed: str) -> None:
    for report in directory.metrics.steps():
        failed = report.metrics["reward/failed"]
        assert 0 < failed < 16
        assert report.metrics["reward"] > 0.3  # a mean over those that did not fail; zeros would halve it
        assert f"warning: {failed:g} of 16 rewards of step {report.step} failed, and are left out; the first" in printed
    assert printed.count(" rewards of the evaluation failed, and are left out; ") == STEPS + 1


@pytest.mark.extended
def test_a_reward_that_always_raises_stops_the_run_and_says_how_to_go_on(workplace: Workplace, failure: str) -> None:
    assert "RewardFailureError" in failure
    assert "no opinion at all" in failure
    assert failure.endswith("; log: runs/failing/driver.log; resume with: sluice resume failing\n")
    assert "Traceback" not in failure
    assert "Traceback" in (workplace.folder / "runs/failing/driver.log").read_text()


@pytest.mark.extended
def test_a_step_costs_prefect_the_same_for_one_and_two_rollout_workers(workplace: Workplace, failure: str) -> None:
    one, two = (requests_of_step(workplace, run_id) for run_id in (RUN_ID, FAILING))
    assert one[NEW_FLOW_RUN] == 1
    assert two == one
    tasks = task_runs_of_step(workplace, RUN_ID)
    assert {"rollout", "put", "reference", "advantage", "update", "publish"} == set(tasks)
    assert task_runs_of_step(workplace, FAILING) == tasks


def test_a_ray_that_does_not_answer_is_told_at_once(workplace: Workplace) -> None:
    printed = workplace.sluice("train", "tiny.toml", "services.ray_address=127.0.0.1:9", exit_code=2)
    assert "no Ray head responds at '127.0.0.1:9'" in printed
    assert "Traceback" not in printed


@pytest.mark.command("report", "runs")
def test_report_and_resume_of_a_finished_run(
    workplace: Workplace, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace.folder)
    sluice = make_command(monkeypatch, capsys)
    resumed = sluice("resume", RUN_ID)
    assert resumed.exit_code == 0
    assert f"is complete: {STEPS} of {STEPS} steps" in resumed.out
    assert (directory.path / "report.html").exists()  # written at the end of the run
    assert "report.html" in sluice("report", RUN_ID).out
    listed = {run["run_id"]: run for run in json.loads(sluice("runs", "--json").out)}
    assert (listed[RUN_ID]["state"], listed[RUN_ID]["step"]) == ("finished", STEPS)


@pytest.mark.extended
def test_a_finished_run_is_evaluated(workplace: Workplace, directory: RunDirectory) -> None:
    evaluated = workplace.sluice("eval", RUN_ID, "eval.samples_per_prompt=2", "eval.temperature=1.0")
    assert f"policy version {STEPS}: accuracy" in evaluated
    assert "tiny: mean@2" in evaluated


def test_the_ui_has_named_runs_and_artifacts(workplace: Workplace, printed: str) -> None:
    names = [RUN_ID, *(f"{RUN_ID}/step-{step:04d}" for step in range(STEPS))]

    async def question(client: PrefectClient):  # type: ignore[no-untyped-def]
        chosen = FlowRunFilter(name=FlowRunFilterName(any_=names))
        return await client.read_flow_runs(flow_run_filter=chosen), await client.read_artifacts(**OWN_ARTIFACTS)

    runs, artifacts = workplace.ask(question)
    assert {run.name: run.state_name for run in runs} == dict.fromkeys(names, "Completed")
    kinds = {(artifact.type, artifact.key) for artifact in artifacts if (artifact.key or "").startswith(RUN_ID)}
    assert kinds == {
        ("progress", f"{RUN_ID}-progress"),
        ("markdown", f"{RUN_ID}-summary"),
        ("table", f"{RUN_ID}-samples"),
        ("table", f"{RUN_ID}-eval"),
        ("table", f"{RUN_ID}-workers"),
    }
    table = next(json.loads(str(artifact.data)) for artifact in artifacts if artifact.key == f"{RUN_ID}-eval")
    assert [row["source"] for row in table] == ["tiny"]
    assert {"mean@1", "best@1", "maj@1", "reward"} <= set(table[0])


def test_the_ui_shows_the_curves_and_where_the_report_is(
    workplace: Workplace, directory: RunDirectory, tmp_path: Path
) -> None:
    found = {
        artifact.key: artifact for artifact in workplace.ask(lambda client: client.read_artifacts(**OWN_ARTIFACTS))
    }
    address = str(workplace.services.prefect_api_url).removesuffix("/api")
    with open_browser(tmp_path) as page:
        page.open(f"{address}/artifacts/artifact/{found[f'{RUN_ID}-progress'].id}")
        page.wait_for("document.querySelector('img[src^=\"data:image/svg\"]')?.naturalWidth > 0")
        assert f"{STEPS} of {STEPS} steps" in page.text()
        assert "groups/zero_variance" in page.text()
        page.open(f"{address}/artifacts/artifact/{found[f'{RUN_ID}-summary'].id}")
        page.wait_for("document.body.innerText.includes('tokens per second')")
        page.resize(PHONE)
        page.wait_for(f"document.documentElement.scrollWidth <= {PHONE}")
        assert str(directory.path / "report.html") in page.text()


def test_log_lines_of_workers_are_at_the_task_that_called_them(workplace: Workplace, printed: str) -> None:
    async def question(client: PrefectClient):  # type: ignore[no-untyped-def]
        chosen = FlowRunFilter(name=FlowRunFilterName(any_=[RUN_ID]))
        (run,) = await client.read_flow_runs(flow_run_filter=chosen)
        logs = await client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))
        tasks = await client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])))
        return logs, {task.id: task.name for task in tasks}

    logs, tasks = workplace.ask(question)
    lines = [log for log in logs if log.message.startswith("rollout-0: computing on")]
    assert [tasks[line.task_run_id].partition("-")[0] for line in lines] == ["start"]  # once, of engine and worker
    assert "computing on" not in printed  # the terminal gets only their warnings
    assert "warning: rollout-0: train.parquet: dropped 2 of 12 rows" in printed


def test_a_scheduled_deployment_gets_its_runs(workplace: Workplace, printed: str) -> None:
    """Guards the pins: with SQLAlchemy 2.1, the server of Prefect 3.8 never creates a scheduled run."""

    async def deploy(client: PrefectClient):  # type: ignore[no-untyped-def]
        flow_id = await client.create_flow_from_name("scheduled")
        schedule = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 * * * *", timezone="UTC"), active=True)
        return await client.create_deployment(flow_id, "hourly", schedules=[schedule])

    deployment = workplace.ask(deploy)

    async def scheduled(client: PrefectClient):  # type: ignore[no-untyped-def]
        return await client.read_flow_runs(deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment])))

    wait_until(lambda: len(workplace.ask(scheduled)) >= 2)
    runs = workplace.ask(scheduled)
    times = sorted(run.expected_start_time for run in runs)
    assert times[1] - times[0] == timedelta(hours=1)
    assert {run.state_name for run in runs} <= {"Scheduled", "Late"}  # the hour may be full just now
