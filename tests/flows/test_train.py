"""A whole run through the command, on a real Prefect server and a real Ray."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import (
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
from schemas.metric_catalog import metric_spec, metrics_of
from schemas.step import RunSummary
from tests.browser import PHONE, open_browser
from tests.progress import wait_until
from tests.services import Workplace

pytestmark = pytest.mark.slow

RUN_ID = "whole"
STEPS = 2

# The command, and then what its own process has read from the column store.
COUNTED_COMMAND = """
from flows.cli import main as cli
from infra.stores.base import ColumnStore
try:
    cli.main()
finally:
    print("driver read", ColumnStore.bytes_read, "bytes of columns")
"""


@pytest.fixture(scope="module")
def printed(workplace: Workplace) -> str:
    """Return the output of a run whose reward fails for half of the samples."""
    return workplace.python(
        *("-P", "-c", COUNTED_COMMAND, "train", "tiny.toml", f"steps={STEPS}", "--run-id", RUN_ID),
        *("reward.path=tiny_rewards:sometimes", "reward.max_failure_fraction=0.9", 'monitors=[{kind="tensorboard"}]'),
        *("data.max_prompt_tokens=9", "data.overlong=drop"),
    )


@pytest.fixture(scope="module")
def directory(workplace: Workplace, printed: str) -> RunDirectory:
    return RunDirectory(workplace.folder / "runs" / RUN_ID)


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
        *("lease", "rollout", "put", "reference", "advantage", "update", "publish"),
    }
    steps = directory.metrics.steps()
    assert [report.step for report in steps] == list(range(STEPS))
    assert summary["reward_first"] == pytest.approx(sum(step.metrics["reward"] for step in steps) / STEPS)
    assert [report.policy_version for report in directory.metrics.evals()] == [0, STEPS]
    assert any((directory.path / "tensorboard").iterdir())


def test_every_metric_is_in_the_catalog(workplace: Workplace, directory: RunDirectory) -> None:
    for report in directory.metrics.steps():
        for name in report.metrics:
            metric_spec(name)
        assert {spec.name for spec in metrics_of("terminal")} - report.metrics.keys() == {"reward/kl"}


def test_a_reward_that_raises_is_counted_and_masked(directory: RunDirectory) -> None:
    for report in directory.metrics.steps():
        failed = report.metrics["reward/failed"]
        assert 0 < failed < 16
        assert report.metrics["reward"] > 0.3  # a mean over those that did not fail; zeros would halve it


def test_a_reward_that_always_raises_stops_the_run_and_says_how_to_go_on(workplace: Workplace) -> None:
    printed = workplace.sluice(
        *("train", "tiny.toml", "--run-id", "failing", "data.eval_path=train.parquet", "kl.coef=0"),
        *("reward.path=tiny_rewards:sometimes", "reward.max_failure_fraction=0.01"),
        exit_code=1,
    )
    assert "RewardFailureError" in printed
    assert "no opinion on odd answers" in printed
    assert printed.endswith("; log: runs/failing/driver.log; resume with: sluice resume failing\n")
    assert "Traceback" not in printed
    assert "Traceback" in (workplace.folder / "runs/failing/driver.log").read_text()


def test_a_ray_that_does_not_answer_is_told_at_once(workplace: Workplace) -> None:
    printed = workplace.sluice("train", "tiny.toml", "runtime.ray_address=127.0.0.1:9", exit_code=2)
    assert "no Ray head responds at '127.0.0.1:9'" in printed
    assert "Traceback" not in printed


def test_report_eval_and_resume_of_a_finished_run(workplace: Workplace, directory: RunDirectory) -> None:
    assert "is complete: 2 of 2 steps" in workplace.sluice("resume", RUN_ID)
    assert (directory.path / "report.html").exists()  # written at the end of the run
    assert "report.html" in workplace.sluice("report", RUN_ID)
    listed = {run["run_id"]: run for run in json.loads(workplace.sluice("runs", "--json"))}
    assert (listed[RUN_ID]["state"], listed[RUN_ID]["step"]) == ("finished", STEPS)
    evaluated = workplace.sluice("eval", RUN_ID, "eval.samples_per_prompt=2", "eval.temperature=1.0")
    assert "policy version 2: accuracy" in evaluated
    assert "tiny: mean@2" in evaluated


def test_the_ui_has_named_runs_and_artifacts(workplace: Workplace, printed: str) -> None:
    names = [RUN_ID, *(f"{RUN_ID}/step-{step:04d}" for step in range(STEPS))]

    async def question(client: PrefectClient):  # type: ignore[no-untyped-def]
        chosen = FlowRunFilter(name=FlowRunFilterName(any_=names))
        return await client.read_flow_runs(flow_run_filter=chosen), await client.read_artifacts()

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


def test_the_ui_shows_the_curves_and_links_to_the_report(
    workplace: Workplace, directory: RunDirectory, tmp_path: Path
) -> None:
    found = {artifact.key: artifact for artifact in workplace.ask(lambda client: client.read_artifacts())}
    address = str(workplace.services.prefect_api_url).removesuffix("/api")
    with open_browser(tmp_path) as page:
        page.open(f"{address}/artifacts/artifact/{found[f'{RUN_ID}-progress'].id}")
        page.wait_for("document.querySelector('img[src^=\"data:image/svg\"]')?.naturalWidth > 0")
        assert f"{STEPS} of {STEPS} steps" in page.text()
        assert "groups/zero_variance" in page.text()
        page.open(f"{address}/artifacts/artifact/{found[f'{RUN_ID}-summary'].id}")
        page.wait_for("document.body.innerText.includes('tokens per second')")
        page.resize(PHONE)
        assert page.overflow() <= 0
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
    assert {tasks[line.task_run_id].partition("-")[0] for line in lines} == {"start"}
    assert "computing on" not in printed  # the terminal gets only their warnings
    assert "warning: rollout-0: train.parquet: dropped 2 of 12 rows" in printed


def test_a_scheduled_deployment_gets_its_runs(workplace: Workplace, printed: str) -> None:
    """Guards the pins: with SQLAlchemy 2.1 the server never creates a scheduled run."""

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
    assert {run.state_name for run in runs} == {"Scheduled"}
