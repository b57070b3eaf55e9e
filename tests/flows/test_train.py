"""A whole run through the command, on a real Prefect server and a real Ray."""

import asyncio
import json
from datetime import timedelta

import pytest
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterName,
)
from prefect.client.schemas.schedules import CronSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.storage.runs import RunDirectory
from schemas.metric_catalog import metric_spec, metrics_of
from schemas.step import RunSummary, StoredBatch
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
        *("reward.path=tiny_rewards:sometimes", "reward.max_failure_fraction=0.9", "runtime.tensorboard=true"),
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
        *("lease", "rollout", "put", "logprob", "reference", "advantage", "update", "publish"),
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
        *("train", "tiny.toml", "--run-id", "failing", "data.eval_path=train.parquet"),
        *("reward.path=tiny_rewards:sometimes", "reward.max_failure_fraction=0.01"),
        exit_code=1,
    )
    assert "RewardFailureError" in printed
    assert "no opinion on odd answers" in printed
    assert "resume with: sluice resume failing" in printed
    assert "Traceback" not in printed


def test_a_ray_that_does_not_answer_is_told_at_once(workplace: Workplace) -> None:
    printed = workplace.sluice("train", "tiny.toml", "runtime.ray_address=127.0.0.1:9", exit_code=2)
    assert "no Ray head responds at '127.0.0.1:9'" in printed
    assert "Traceback" not in printed


def test_report_eval_and_resume_of_a_finished_run(workplace: Workplace, directory: RunDirectory) -> None:
    assert "is complete: 2 of 2 steps" in workplace.sluice("resume", RUN_ID)
    assert "report.html" in workplace.sluice("report", RUN_ID)
    page = (directory.path / "report.html").read_text()
    assert page.count("<svg") >= 3
    assert "http" not in page.replace("http://127.0.0.1", "")  # one file, nothing to fetch
    evaluated = workplace.sluice("eval", RUN_ID, "eval.samples_per_prompt=2", "eval.temperature=1.0")
    assert "policy version 2: accuracy" in evaluated
    assert "tiny: mean@2" in evaluated


def api(workplace: Workplace, question):  # type: ignore[no-untyped-def]
    """Ask the workplace's Prefect server."""

    async def ask():  # type: ignore[no-untyped-def]
        async with get_client() as client:
            return await question(client)

    with temporary_settings({PREFECT_API_URL: workplace.services.prefect_api_url}):
        return asyncio.run(ask())


def test_the_ui_has_named_runs_and_artifacts(workplace: Workplace, printed: str) -> None:
    names = [RUN_ID, *(f"{RUN_ID}/step-{step:04d}" for step in range(STEPS))]

    async def question(client: PrefectClient):  # type: ignore[no-untyped-def]
        chosen = FlowRunFilter(name=FlowRunFilterName(any_=names))
        return await client.read_flow_runs(flow_run_filter=chosen), await client.read_artifacts()

    runs, artifacts = api(workplace, question)
    assert {run.name: run.state_name for run in runs} == dict.fromkeys(names, "Completed")
    kinds = {(artifact.type, artifact.key) for artifact in artifacts if (artifact.key or "").startswith(RUN_ID)}
    assert kinds == {
        ("progress", f"{RUN_ID}-progress"),
        ("table", f"{RUN_ID}-samples"),
        ("table", f"{RUN_ID}-eval"),
    }
    table = next(json.loads(str(artifact.data)) for artifact in artifacts if artifact.key == f"{RUN_ID}-eval")
    assert [row["source"] for row in table] == ["tiny"]
    assert {"mean@1", "best@1", "maj@1", "reward"} <= set(table[0])


def test_what_the_ledger_holds_is_small_and_plain(workplace: Workplace) -> None:
    run = workplace.run("looked-at")
    driver = workplace.start("train", "tiny.toml", "--run-id", run.run_id)
    driver.wait_for(lambda: run.committed(1, "advantage"))
    driver.kill()
    entries = list(run.step_ledger(1).glob("*"))
    assert {entry.name.split("-")[0] for entry in entries} >= {"rollout", "put", "logprob", "reference", "advantage"}
    for entry in entries:
        record = json.loads(entry.read_text())  # JSON throughout: no tensor, table or object reference
        assert len(entry.read_bytes()) < 20_000
        assert "ObjectRef" not in entry.read_text()
        assert record["metadata"]["serializer"]["type"] == "json"
    put = json.loads(next(entry for entry in entries if entry.name.startswith("put")).read_text())
    handle = json.loads(put["result"]) if isinstance(put["result"], str) else put["result"]
    assert StoredBatch.model_validate(handle["data"]).batch.columns[:2] == ("prompt_ids", "response_ids")


def test_a_scheduled_deployment_gets_its_runs(workplace: Workplace, printed: str) -> None:
    """Guards the pins: with SQLAlchemy 2.1 the server never creates a scheduled run."""

    async def deploy(client: PrefectClient):  # type: ignore[no-untyped-def]
        flow_id = await client.create_flow_from_name("scheduled")
        schedule = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 * * * *", timezone="UTC"), active=True)
        return await client.create_deployment(flow_id, "hourly", schedules=[schedule])

    deployment = api(workplace, deploy)

    async def scheduled(client: PrefectClient):  # type: ignore[no-untyped-def]
        return await client.read_flow_runs(deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment])))

    wait_until(lambda: len(api(workplace, scheduled)) >= 2)
    runs = api(workplace, scheduled)
    times = sorted(run.expected_start_time for run in runs)
    assert times[1] - times[0] == timedelta(hours=1)
    assert {run.state_name for run in runs} == {"Scheduled"}
